"""What the events of a run say of its time, and of what has happened: a fold, without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ncclops.goodput import Span, SpansSoFar
from ncclops.live_view.lines import Style
from ncclops.live_view.words import count, duration
from ncclops.rank_lists import ranks_named
from ncclops.record.events import (
    ClassifiedEvent,
    CompileStallEvent,
    CompileWarmupEvent,
    ControlEvent,
    EscalationEvent,
    Event,
    EventsLostEvent,
    ExitForcedEvent,
    FaultEvent,
    GpuFaultEvent,
    HangEndedEvent,
    HangEvent,
    InternalErrorEvent,
    NodesEvent,
    ResourceGrowthEvent,
    RestartEvent,
    RestartStallEvent,
    RetryEvent,
    RunStartedEvent,
    StartupStallEvent,
    StopAgreedEvent,
    StopForcedEvent,
    StopRequestedEvent,
    StragglerEvent,
    VerdictEvent,
    WorkerExitedEvent,
    XidEvent,
)

# Of a run with thousands of faults the newest are looked at.
_MOST = 2000
# The same of several ranks is one line, if no more than so much lies between.
_TOGETHER_S, _LOOKED_BACK = 5.0, 4
_FAULTS = (FaultEvent, HangEvent, GpuFaultEvent)


@dataclass(frozen=True)
class Happening:
    """Something that happened at ``ts`` (seconds since the epoch), in words; ``ranks``: to whom.

    ``is_fault``: it is marked in the bar of the last hour.
    """

    ts: float
    said: str
    style: Style = ""
    is_fault: bool = False
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """With the ranks in front."""
        return f"{ranks_named(self.ranks)}: {self.said}" if self.ranks else self.said


@dataclass(frozen=True, kw_only=True)
class Past:
    """A run until ``now``, in seconds since the epoch: its time, and what happened in it.

    ``began`` is None where no event has been read; ``ended`` as long as there is no verdict.
    """

    now: float = 0.0
    began: float | None = None
    ended: float | None = None
    spans: Sequence[Span] = ()
    happenings: Sequence[Happening] = ()


class History:
    """Takes each event of a run once, in the order of its file."""

    def __init__(self) -> None:
        self._spans = SpansSoFar()
        self._began: float | None = None
        self._ended: float | None = None
        self._happenings: deque[Happening] = deque(maxlen=_MOST)

    def take(self, event: Event) -> None:
        """One more event."""
        self._spans.take(event)
        if self._began is None:
            self._began = event.ts
        if isinstance(event, VerdictEvent):
            self._ended = event.ts
        if (happening := describe(event)) is not None:
            self._add(happening)

    def _add(self, new: Happening) -> None:
        """What happens to one rank after the other is one line."""
        for number in range(-1, -min(_LOOKED_BACK, len(self._happenings)) - 1, -1):
            last = self._happenings[number]
            alike = (last.said, last.is_fault) == (new.said, new.is_fault)
            if alike and new.ranks and last.ranks and abs(new.ts - last.ts) < _TOGETHER_S:
                ranks = tuple(sorted({*last.ranks, *new.ranks}))
                self._happenings[number] = replace(last, ranks=ranks)
                return
        self._happenings.append(new)

    def until(self, now: float) -> Past:
        """What was taken so far, as of ``now`` or of the run's end."""
        return Past(
            now=now,
            began=self._began,
            ended=self._ended,
            spans=self._spans.until(now),
            happenings=tuple(self._happenings),
        )


def describe(event: Event) -> Happening | None:
    """``event`` in words, if a person who looks at the last hour wants to know of it."""
    said, style = _of_a_rank(event)
    # A worker's traceback is not for a line.
    text = " ".join(said[:2000].split())
    ranks = () if event.rank is None else (event.rank,)
    return Happening(event.ts, text, style, isinstance(event, _FAULTS), ranks) if text else None


def _of_a_rank(event: Event) -> tuple[str, Style]:
    """What fails, and what follows from it."""
    match event:
        case FaultEvent():
            return _said_of(event), "red"
        case HangEvent():
            return _hang(event), "red"
        case GpuFaultEvent():
            return str(event.fault), "red"
        case XidEvent():
            return f"Xid {event.xid}: {event.what}", "yellow"
        case RestartEvent():
            return _restart(event), "yellow" if event.instead is None else "red"
        case EscalationEvent():
            follows = "new processes" if event.to == "respawn" else "the job ends"
            return f"{follows}: {event.reason}", "yellow"
        case RetryEvent():
            pause = f" in {duration(event.cooldown_s)}" if event.cooldown_s else ""
            number = "another attempt" if event.attempt is None else f"attempt {event.attempt}"
            return f"{number}{pause}: {event.reason}", "yellow"
        case ClassifiedEvent():
            return f"{event.class_}: {event.summary}", "red"
        case StragglerEvent(kind="over"):
            return "keeps pace again", "green"
        case StragglerEvent():
            causes = f" ({', '.join(event.hardware)})" if event.hardware else ""
            behind = f"{event.kind} straggler, {event.ratio:.2f} of the median{causes}"
            return behind, "yellow"
        case HangEndedEvent():
            return f"hung, ended by {event.signal}", "yellow"
        case WorkerExitedEvent() if event.exit_code != 0:
            how = event.signal or f"exit code {event.exit_code}"
            return f"process ended: {how}", "red"
    return _of_the_run(event)


def _of_the_run(event: Event) -> tuple[str, Style]:
    """What is no failure, or none of a rank."""
    match event:
        case RunStartedEvent():
            return "started", ""
        case NodesEvent():
            return f"{count(len(event.nodes), 'node')} have met", ""
        case CompileWarmupEvent():
            took = f" after {duration(event.seconds)}" if event.seconds is not None else ""
            return f"warmed up{took}", ""
        case StartupStallEvent() | CompileStallEvent() | RestartStallEvent():
            return event.message, "yellow"
        case ResourceGrowthEvent() if event.exceeded is not None:
            return event.exceeded, "yellow"
        case ExitForcedEvent():
            return f"did not end by itself: {event.signal}", "yellow"
        case ControlEvent():
            by = f" by {event.by}" if event.by else ""
            why = f": {event.reason}" if event.reason else ""
            return f"{event.action} was requested{by}{why}", "cyan"
        case StopRequestedEvent(asks_the_run=True):
            return f"asked to stop: {event.reason or event.signal or ''}", "cyan"
        case StopRequestedEvent():
            return f"killed {ranks_named(event.ranks or [])}", "yellow"
        case StopAgreedEvent() if event.step is not None:
            return f"all ranks end after step {event.step}", ""
        case StopForcedEvent():
            return f"{ranks_named(event.ranks)} did not end together: {event.reason}", "yellow"
        case InternalErrorEvent():
            return f"error within ncclops while {event.doing}: {event.error}", "yellow"
        case EventsLostEvent():
            return f"{count(event.count, 'event')} could not be written", "yellow"
        case VerdictEvent():
            reason = event.reason.removeprefix(f"{event.outcome}: ")
            why = f": {reason}" if reason else ""
            return f"{event.outcome}{why}", "green" if event.exit_code == 0 else "red"
    return "", ""


def _said_of(event: FaultEvent) -> str:
    where = f" on {event.on}" if event.on else ""
    if event.loss is not None:
        return f"{event.loss.replace('-', ' ')}{where}: {event.why or ''}"
    return f"{_without_its_rank(event.cause, event)}{where}"


def _hang(event: HangEvent) -> str:
    if event.culprits == [event.rank]:
        return f"hangs: {_without_its_rank(event.cause, event)}"
    return f"{ranks_named(event.culprits)} hang: {event.cause}"


def _without_its_rank(cause: str, event: Event) -> str:
    """``cause`` of ``event``, whose rank stands in front of it."""
    return cause.removeprefix(f"rank {event.rank}: ")


def _restart(event: RestartEvent) -> str:
    if event.instead is not None:
        return f"no restart in place ({event.instead} follows): {event.cause}"
    left = event.world_size
    verb = "goes" if left == 1 else "go"
    ranks = "" if left is None else f", {count(left, 'rank')} {verb} on"
    gone = [rank for rank in event.ranks_lost if rank not in event.ranks_returned]
    lost = f", without {ranks_named(gone)}" if gone else ""
    back = f", {ranks_named(event.ranks_returned)} in a new process" if event.ranks_returned else ""
    took = f" after {sum(event.phases_ms.values()):.0f} ms" if event.phases_ms else ""
    return f"restart in place{took}{ranks}{lost}{back}"
