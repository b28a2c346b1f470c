"""Which events of a run are worth a notification. Pure: events and the time in, notices out.

    failed          the job has failed, or lacks the receipt that was required
    restart-storm   many restarts within a short time
    no-progress     no step for long, a hang, or a start that takes too long
    slow-rank       the others wait for a rank
    spare-used      a node in reserve has taken the place of another one
    node-suspected  a GPU made its rank fail, a node was lost, or is not fit
    goodput-below   too little of the time goes into training

Of several nodes each has an agent. What all of them see is told by the first that is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ncclops.durations import format_duration
from ncclops.goodput import SpansSoFar, measure
from ncclops.profiles.notification import NotifySettings, Rule
from ncclops.rank_lists import ranks_named
from ncclops.record.events import (
    NODE_LOST,
    ClassifiedEvent,
    CompileStallEvent,
    Event,
    FaultEvent,
    GpuFaultEvent,
    HangEvent,
    NodesEvent,
    PreflightEvent,
    RestartEvent,
    RetryEvent,
    RunStartedEvent,
    StartupStallEvent,
    StepEvent,
    StopRequestedEvent,
    StragglerEvent,
    VerdictEvent,
    WorkerStartedEvent,
)

Severity = Literal["critical", "error", "warning", "info"]
# What a message is sent for: a rule, or a test of its channel.
SentFor = Rule | Literal["test"]
SEVERITIES: Mapping[SentFor, Severity] = {
    "failed": "critical",
    "restart-storm": "error",
    "no-progress": "error",
    "slow-rank": "warning",
    "spare-used": "warning",
    "node-suspected": "warning",
    "goodput-below": "warning",
    "test": "info",
}
# Goodput changes slowly.
_MEASURED_EVERY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One notification: ``summary`` in a line, ``subject`` what it is about (a rank, a node) where
    that is not the run, ``held_back`` how many of the same the cooldown has kept back before it."""

    rule: SentFor
    summary: str
    subject: str = ""
    held_back: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        return SEVERITIES[self.rule]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the run is, for heartbeats. ``goodput`` is from 0 to 1; None: not known."""

    step: int | None = None
    step_s: float | None = None
    restarts: int = 0
    goodput: float | None = None
    outcome: str | None = None
    reason: str = ""


class Rules:
    """The rules over one run, on the node ``node``. Feed each event to :meth:`take`, in order.

    ``now`` is a clock in seconds that is never set; events have their own time. One thread.
    """

    def __init__(self, settings: NotifySettings, *, node: str) -> None:
        self._settings, self._node = settings, node
        self._told: dict[tuple[SentFor, str], float] = {}
        self._held_back: dict[tuple[SentFor, str], int] = {}
        self._spans = SpansSoFar()
        self._measured_at: float | None = None
        self._began_at: float | None = None
        self._step_at: float | None = None  # of the last step; None: none since the last start
        self._restarts: deque[float] = deque()
        self._nodes: list[str] = []  # those that are left, in order of their rank
        self._spares: set[str] = set()
        self._world_size: int | None = None
        self._class: str | None = None
        self._stopping = False
        self.progress = Progress()

    @property
    def speaks_for_all(self) -> bool:
        """Whether this node tells what all nodes see."""
        return not self._nodes or self._nodes[0] == self._node

    def take(self, event: Event, now: float) -> list[Notice]:
        """What ``event`` is worth telling."""
        self._spans.take(event)
        return self._admitted(self._of(event, now), now)

    def tick(self, now: float, wall: float) -> list[Notice]:
        """What the time is worth telling; ``wall`` is now in seconds since the epoch."""
        return self._admitted(self._overdue(now, wall), now)

    def _admitted(self, notices: Iterator[Notice], now: float) -> list[Notice]:
        admitted = []
        for notice in notices:
            key = (notice.rule, notice.subject)
            told = self._told.get(key)
            if told is not None and now - told < self._settings.cooldown.total_seconds():
                self._held_back[key] = self._held_back.get(key, 0) + 1
                continue
            self._told[key] = now
            admitted.append(replace(notice, held_back=self._held_back.pop(key, 0)))
        return admitted

    # --- events ---------------------------------------------------------------------------------

    def _of(self, event: Event, now: float) -> Iterator[Notice]:
        match event:
            case RunStartedEvent():
                self._began_at, self._world_size = now, event.world_size
            case WorkerStartedEvent():
                self._step_at = None  # what the start takes, the stall windows watch
            case StepEvent():
                self._step_at = now
                self.progress = replace(self.progress, step=event.step, step_s=event.step_s)
            case NodesEvent():
                yield from self._meet(event)
            case RestartEvent() | RetryEvent():
                yield from self._restarted(event, now)
            case HangEvent() if self.speaks_for_all:
                who = ranks_named(event.culprits)
                yield Notice(rule="no-progress", summary=f"{who} hung: {event.cause}")
            case StartupStallEvent() | CompileStallEvent() if self.speaks_for_all:
                yield Notice(rule="no-progress", summary=event.message)
            case StragglerEvent(kind="chronic") if event.host in ("", self._node):
                yield self._slow(event)
            case GpuFaultEvent():
                yield self._suspect(event.fault.node, str(event.fault))
            case PreflightEvent(failed=True):
                yield from self._unfit(event)
            case FaultEvent(on=str(lost)) if event.loss == NODE_LOST:
                self._nodes = [name for name in self._nodes if name != lost]
                if self.speaks_for_all:
                    yield self._suspect(lost, f"node {lost} was lost: {event.why or 'no reason'}")
            case ClassifiedEvent():
                self._class = event.class_
            case StopRequestedEvent(asks_the_run=True):
                self._stopping = True
            case VerdictEvent():
                yield from self._ended(event)

    def _meet(self, event: NodesEvent) -> Iterator[Notice]:
        before, self._spares = self._spares, {each.name for each in event.nodes if each.spare}
        self._nodes = [each.name for each in sorted(event.nodes, key=lambda each: each.rank)]
        used = [name for name in self._nodes if name in before - self._spares]
        if used and self.speaks_for_all:
            names = ", ".join(used)
            yield Notice(rule="spare-used", summary=f"{names} was in reserve and trains now")

    def _restarted(self, event: RestartEvent | RetryEvent, now: float) -> Iterator[Notice]:
        self._step_at = None
        if isinstance(event, RetryEvent):
            if not self.speaks_for_all:
                return  # all agents record it; a restart in place only one
            cause = event.reason
        else:
            cause = event.cause
            yield from self._replaced(event)
            if event.instead is not None:
                return  # the job ends, or new processes follow with an event of their own
        self.progress = replace(self.progress, restarts=self.progress.restarts + 1)
        window = self._settings.restarts_within
        self._restarts.append(now)
        while now - self._restarts[0] > window.total_seconds():
            self._restarts.popleft()
        if (count := len(self._restarts)) >= self._settings.restarts:
            within = format_duration(window)
            yield Notice(
                rule="restart-storm",
                summary=f"{count} restarts within {within}, the last one after: {cause}",
                details={"restarts": count},
            )

    def _replaced(self, event: RestartEvent) -> Iterator[Notice]:
        """A spare's ranks move up where as many go on although some were lost."""
        size, before = event.world_size, self._world_size
        self._world_size = size if size is not None else before
        gone = [rank for rank in event.ranks_lost if rank not in event.ranks_returned]
        if self._spares and gone and size is not None and before is not None and size >= before:
            names = ", ".join(sorted(self._spares))
            summary = f"a node in reserve ({names}) has taken the place of {ranks_named(gone)}"
            yield Notice(rule="spare-used", summary=summary)

    def _slow(self, event: StragglerEvent) -> Notice:
        why = f" ({'; '.join(event.hardware)})" if event.hardware else ""
        on = event.host or self._node
        return Notice(
            rule="slow-rank",
            subject=f"rank {event.rank}",
            summary=f"rank {event.rank} on {on} takes {event.ratio:.2f} times as long as the median"
            f" rank{why}",
            details={"rank": event.rank, "node": on, "ratio": event.ratio},
        )

    def _unfit(self, event: PreflightEvent) -> Iterator[Notice]:
        why = f": {event.causes[0]}" if event.causes else ""
        for host in event.hosts:
            if host == self._node or self.speaks_for_all:
                yield self._suspect(host, f"node {host} is not fit{why}")

    def _suspect(self, node: str, summary: str) -> Notice:
        return Notice(rule="node-suspected", subject=node, summary=summary, details={"node": node})

    def _ended(self, event: VerdictEvent) -> Iterator[Notice]:
        self._stopping = True
        why = event.what or event.reason
        self.progress = replace(self.progress, outcome=event.outcome, reason=why)
        if event.outcome in ("failed", "no-receipt") and self.speaks_for_all:
            how = "failed" if event.outcome == "failed" else "has no healthy receipt"
            yield Notice(
                rule="failed",
                summary=f"{how}: {why}",
                details={"exit_code": event.exit_code, "class": self._class},
            )

    # --- the time ---------------------------------------------------------------------------------

    def _overdue(self, now: float, wall: float) -> Iterator[Notice]:
        if self._stopping or not self.speaks_for_all:
            return
        limit = self._settings.progress
        if self._step_at is not None and now - self._step_at > limit.total_seconds():
            summary = f"no step for more than {format_duration(limit)} after {self.progress.step}"
            yield Notice(rule="no-progress", summary=summary)
        if self._measured_at is None or now - self._measured_at >= _MEASURED_EVERY_S:
            self._measured_at = now
            yield from self._low_goodput(now, wall)

    def _low_goodput(self, now: float, wall: float) -> Iterator[Notice]:
        settings = self._settings
        ratio = measure(self._spans.until(wall)).ratio
        self.progress = replace(self.progress, goodput=ratio)
        lasted = 0.0 if self._began_at is None else now - self._began_at
        if ratio is None or lasted < settings.goodput_after.total_seconds():
            return
        if ratio < settings.goodput:
            yield Notice(
                rule="goodput-below",
                summary=f"goodput is {ratio:.0%}, below {settings.goodput:.0%}",
                details={"goodput": round(ratio, 4)},
            )
