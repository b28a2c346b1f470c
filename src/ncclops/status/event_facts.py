"""What the events of a run say about it: a fold over them, without any I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ncclops.record.events import (
    NODE_LOST,
    STORE_LOST,
    BootstrappedEvent,
    ClassifiedEvent,
    CompileWarmupEvent,
    EnvAppliedEvent,
    Event,
    FaultEvent,
    RestartEvent,
    RetryEvent,
    RunStartedEvent,
    StepEvent,
    StopRequestedEvent,
    StragglerEvent,
    VerdictEvent,
    WorkerExitedEvent,
    WorkerStartedEvent,
    name_of,
)
from ncclops.status.model import FaultStatus, LastEvent

UNCLASSIFIED = "unclassified"
# What every agent of a run records; of anything else, only the agent of the node it happened on.
SEEN_BY_ALL = (STORE_LOST, NODE_LOST)


@dataclass
class RankFacts:
    """What events say about one rank in its present process."""

    rank: int
    host: str = ""
    pid: int | None = None
    started_ticks: int | None = None
    started: float | None = None
    bootstrapped: bool = False
    warm: bool = False
    step: int | None = None  # of `step` events: one in ten seconds at most
    step_at: float | None = None
    step_s: float | None = None  # the mean since the event before
    ended: bool | None = None  # None: it runs; True: it ended well
    last: LastEvent | None = None

    def add(self, event: Event) -> None:
        """Take an event about this rank into account."""
        match event:
            case WorkerStartedEvent():
                self.pid, self.started = event.pid, event.ts
                self.started_ticks = event.started_ticks
            case BootstrappedEvent():
                self.bootstrapped = True
            case CompileWarmupEvent():
                self.warm = True
            case StepEvent():
                self.step, self.step_at, self.step_s = event.step, event.ts, event.step_s
            case WorkerExitedEvent():
                self.ended = event.exit_code == 0
        self.last = LastEvent(ts=event.ts, event=name_of(event), text=_text(event))

    def start_again(self) -> None:
        """The script starts again in the same process."""
        self.warm, self.step, self.step_at, self.step_s = False, None, None, None


@dataclass
class RunFacts:
    """The fold's state. Feed every event of a run, in order, to :meth:`add`."""

    run_id: str = ""
    profile: str | None = None
    started: float | None = None
    newest: float | None = None
    world_size: int | None = None
    attempt: int = 0
    iteration: int = 0
    restarts: int = 0
    retries: int = 0
    stopping: bool = False
    interrupted: bool = False  # after a fault; the ranks have not made a step since
    between_attempts: bool = False
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    stragglers: dict[int, StragglerEvent] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    last_fault: FaultStatus | None = None
    last_is_elsewhere: bool = False  # another node counts it
    verdict: VerdictEvent | None = None

    def add(self, event: Event) -> None:
        """Take one event into account."""
        self.newest = max(self.newest or event.ts, event.ts)
        self._take(event)
        elsewhere = isinstance(event, FaultEvent) and event.on is not None
        if event.rank is not None and not elsewhere:
            self._rank(event.rank, event).add(event)

    def _take(self, event: Event) -> None:
        match event:
            case RunStartedEvent():
                self.started = event.ts
                self.run_id, self.world_size = event.run_id, event.world_size
            case EnvAppliedEvent():
                self.profile = event.profile
            case WorkerStartedEvent():
                _worker_started(self, event)
            case StepEvent():
                self.interrupted = False
            case StragglerEvent(kind="over") if event.rank is not None:
                self.stragglers.pop(event.rank, None)
            case StragglerEvent() if event.rank is not None:
                self.stragglers[event.rank] = event
            case FaultEvent():
                _fault(self, event)
            case ClassifiedEvent():
                _classified(self, event)
            case RetryEvent():
                self.retries += 1
                self.between_attempts = True
            case RestartEvent():
                _restart(self, event)
            case StopRequestedEvent(asks_the_run=True):
                self.stopping = True
            case VerdictEvent():
                self.verdict = event

    def _rank(self, rank: int, event: Event) -> RankFacts:
        if rank not in self.ranks or isinstance(event, WorkerStartedEvent):
            self.ranks[rank] = RankFacts(rank)
        facts = self.ranks[rank]
        facts.host = event.node or facts.host
        return facts


def _worker_started(run: RunFacts, event: WorkerStartedEvent) -> None:
    if event.attempt > run.attempt:
        run.iteration = 0
        run.stragglers.clear()
    run.attempt = event.attempt
    run.between_attempts = False


def _fault(run: RunFacts, event: FaultEvent) -> None:
    kind = event.loss or event.kind or UNCLASSIFIED
    cause = event.cause.removeprefix(f"rank {event.rank}: ")  # which stands beside it
    run.last_fault = FaultStatus(ts=event.ts, rank=event.rank, kind=kind, cause=cause)
    run.last_is_elsewhere = event.on is not None and event.loss is None
    if not run.last_is_elsewhere:
        run.faults[kind] += 1
    # The job goes on without the store: its loss interrupts nothing.
    run.interrupted = run.interrupted or event.loss != STORE_LOST


def _classified(run: RunFacts, event: ClassifiedEvent) -> None:
    """The attempt's failure has a class: it is the one that was counted as it happened."""
    kind, last = event.class_, run.last_fault
    run.between_attempts = True
    if run.last_is_elsewhere:
        return
    if last is None or last.kind == STORE_LOST:
        last = FaultStatus(ts=event.ts, rank=event.rank, kind=kind, cause=event.summary)
    else:
        run.faults -= Counter({last.kind: 1})
        last = FaultStatus(ts=last.ts, rank=last.rank, kind=kind, cause=last.cause)
    run.last_fault = last
    run.faults[kind] += 1


def _restart(run: RunFacts, event: RestartEvent) -> None:
    if event.instead is None:
        run.restarts += 1
    run.interrupted = True
    run.iteration = event.iteration or run.iteration + 1
    run.stragglers.clear()
    for each in run.ranks.values():
        each.start_again()
        if each.rank in event.ranks_lost and each.rank not in event.ranks_returned:
            each.ended = False


# The most informative field of an event, for a line in a table.
_SAYS_MOST = ("cause", "reason", "signal", "exit_code", "kind", "step", "seconds", "pid")


def _text(event: Event) -> str:
    for name in _SAYS_MOST:
        if (value := getattr(event, name, None)) not in (None, ""):
            said = value if isinstance(value, str) else f"{name} {value}"
            return " ".join(said.split())[:120]
    return ""
