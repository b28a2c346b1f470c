"""The run as spans of time, one after the other without a gap. Pure.

start-up     from the start of processes, or of an iteration, to the first sign of training
compile      compile warm-up, as receipts or printed lines show it
steps        training; unknown without a `step` or `compile-warmup` event
redone       steps that were done before and lost in a fault
restart      from a fault until the function is entered again, or new processes start
cool-down    the pause before a retry
unmeasured   after start-up, where nothing is seen of training: no step so far, or none any more
             in a hang that was found, or until ranks that stood still were stopped by force; of a
             run under way also since the last step, while no other has come for unusually long
end          from the end of the first worker to the verdict
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec

from ncclops.record.events import (
    STEP_EVERY_S,
    STORE_LOST,
    BootstrappedEvent,
    CompileWarmupEvent,
    Event,
    FaultEvent,
    HangEvent,
    RestartEvent,
    RetryEvent,
    RunStartedEvent,
    StepEvent,
    StopForcedEvent,
    VerdictEvent,
    WorkerExitedEvent,
    WorkerStartedEvent,
)
from ncclops.record.progress import UNUSUAL_STEPS

SpanKind = Literal[
    "start-up", "compile", "steps", "redone", "restart", "cool-down", "unmeasured", "end"
]
_OPENING = (RunStartedEvent, WorkerStartedEvent)
KINDS: tuple[SpanKind, ...] = get_args(SpanKind)
TRAINING: tuple[SpanKind, ...] = ("steps", "redone")
# So many of the times between two recorded steps may pass until none is taken to be under way.
_UNUSUAL_RECORDS = 2.0


@dataclass(frozen=True)
class Span:
    """``kind`` from ``start`` to ``end``, in seconds since the epoch."""

    kind: SpanKind
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def spans(events: Iterable[Event], *, now: float | None = None) -> list[Span]:
    """The spans of a run, from its events, in any order.

    A run without a verdict goes on until ``now``, or its last event. What a script has given a time
    outside of the run is taken to have been at its start, or at its end.
    """
    so_far = SpansSoFar()
    newest = so_far.take_all(events, now)
    return so_far.until(max(now or 0.0, newest))


class SpansSoFar:
    """The spans of a run that goes on: takes each event once, as it comes."""

    def __init__(self) -> None:
        self._timeline = _Timeline()
        self._began: float | None = None

    def take_all(self, events: Iterable[Event], now: float | None) -> float:
        """More events, in any order, that are there at ``now``; the time of the newest.

        Each gets a time after the first and before the last that the agent has given its own time.
        """
        ordered = sorted(self._within(list(events), now), key=lambda event: event.ts)
        for event in ordered:
            self._timeline.take(event)
        return ordered[-1].ts if ordered else 0.0

    def _within(self, events: list[Event], now: float | None) -> Iterator[Event]:
        openings = [event.ts for event in events if isinstance(event, _OPENING)]
        if self._began is None and openings:
            self._began = min(openings)
        began = float("-inf") if self._began is None else self._began
        ends = (event.ts for event in events if isinstance(event, VerdictEvent))
        over = max(began, max(ends, default=now or float("inf")))
        for event in events:
            ts = min(max(event.ts, began), over)
            yield event if ts == event.ts else msgspec.structs.replace(event, ts=ts)

    def take(self, event: Event) -> None:
        """One more event, in order of time."""
        self._timeline.take(event)

    def until(self, now: float) -> list[Span]:
        """The spans until ``now``, in seconds since the epoch; none of a run whose beginning is not
        recorded: what lay before would count as nothing."""
        if not self._timeline.has_begun:
            return []
        timeline = copy.copy(self._timeline)
        timeline.spans = list(timeline.spans)
        if not timeline.over:
            timeline.look(now)
        return timeline.spans


class _Timeline:
    """The spans so far, and what the run is doing since ``_since``."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.has_begun = self.over = False
        self._kind: SpanKind = "start-up"
        self._since: float | None = None
        self._furthest = -1  # the highest step ever done
        self._lost_until = -1  # steps up to this one are done again
        self._last_step: tuple[int, float] | None = None  # of this iteration: number, time
        # Of this iteration: the newest step's seconds, the most between two that are recorded.
        self._step_s = self._between_s = 0.0
        self._exited: float | None = None  # the first worker's end, unless the others went on
        self._restarted: list[int] = []  # ranks whose faults the last restart was for

    def take(self, event: Event) -> None:
        """One more event, in order of time."""
        ts = event.ts
        if self._since is None:
            self._since = ts
        match event:
            case RunStartedEvent():
                self.has_begun = True
            case WorkerStartedEvent():
                self._begin_iteration("start-up", ts)
            case BootstrappedEvent() if self._kind == "start-up":
                self._turn("unmeasured", ts)
            case CompileWarmupEvent():
                self._warmed_up(ts, event.seconds or 0.0)
            case StepEvent():
                self._step(event)
            case FaultEvent() if event.loss == STORE_LOST:
                pass  # groups that are up go on without it
            case FaultEvent() if event.rank in self._restarted:
                pass  # each rank reports for itself, and this one after the restart
            case FaultEvent() if self._kind not in ("cool-down", "restart"):
                self._turn("restart", ts if self._exited is None else self._exited)
            case HangEvent():
                self._stood_still()
            case StopForcedEvent() if event.late:
                self._stood_still()
            case RestartEvent():
                self._restart(event)
            case RetryEvent():
                self._turn("cool-down", ts)
            case WorkerExitedEvent() if self._exited is None:
                self._exited = ts
            case VerdictEvent():
                self.close(ts)
                self.over = True

    def close(self, ts: float) -> None:
        """The run ends here."""
        if self._exited is not None:
            self._turn("end", self._exited)
        self._turn(self._kind, ts)

    def look(self, ts: float) -> None:
        """The run is looked at here: a step that lasts unusually long has yet to end."""
        if self._exited is None and self._last_step is not None:
            between = max(self._between_s, STEP_EVERY_S)
            longest = max(UNUSUAL_STEPS * self._step_s, _UNUSUAL_RECORDS * between)
            if ts - self._last_step[1] > longest:
                self._stood_still()
        self.close(ts)

    def _stood_still(self) -> None:
        if self._kind in TRAINING and self._last_step is not None:
            self._turn("unmeasured", self._last_step[1])

    def _restart(self, event: RestartEvent) -> None:
        self._turn("restart", event.ts - sum(event.phases_ms.values()) / 1000)
        self._begin_iteration("start-up", event.ts)
        self._restarted = event.faulty_ranks

    def _begin_iteration(self, kind: SpanKind, ts: float) -> None:
        self._lost_until = self._furthest
        self._last_step = self._exited = None
        self._step_s = self._between_s = 0.0
        self._turn(kind, ts)

    def _warmed_up(self, ts: float, seconds: float) -> None:
        if self._kind in ("start-up", "unmeasured", "compile"):
            self._turn("compile", ts - seconds)
            self._turn(self._steps_kind(), ts)

    def _step(self, event: StepEvent) -> None:
        ts, number, step_s = event.ts, event.step, event.step_s or 0.0
        if self._kind in ("restart", "cool-down"):
            return
        self._exited, self._restarted = None, []
        if self._kind in ("start-up", "unmeasured", "compile"):
            self._turn(self._steps_kind(), ts - step_s)
        if self._kind == "redone" and number > self._lost_until:
            self._turn("steps", self._passed(number, ts, step_s))
        if self._last_step is not None:
            self._between_s = max(self._between_s, ts - self._last_step[1])
        self._step_s = step_s
        self._last_step = (number, ts)
        self._furthest = max(self._furthest, number)

    def _steps_kind(self) -> SpanKind:
        return "redone" if self._lost_until >= 0 else "steps"

    def _passed(self, number: int, ts: float, step_s: float) -> float:
        """When the last lost step was done again, if steps took as long as the last recorded one.

        ``step_s`` is how long, for the first that is recorded in an iteration.
        """
        assert self._since is not None
        new = number - self._lost_until
        if self._last_step is None:
            return max(self._since, ts - new * step_s)
        before, then = self._last_step
        if number <= before:
            return ts
        share = max(0, self._lost_until - before) / (number - before)
        return then + share * (ts - then)

    def _turn(self, kind: SpanKind, ts: float) -> None:
        """From ``ts`` on it is ``kind``. What was taken for something else after that is undone."""
        assert self._since is not None
        while self.spans and self.spans[-1].end > ts:
            last = self.spans.pop()
            self._since = last.start
            if last.start < ts:
                self.spans.append(replace(last, end=ts))
                self._since = ts
        if ts > self._since:
            self._add(Span(self._kind, self._since, ts))
            self._since = ts
        self._kind = kind

    def _add(self, span: Span) -> None:
        if self.spans and self.spans[-1].kind == span.kind:
            span = replace(span, start=self.spans.pop().start)
        self.spans.append(span)
