"""What the events of a run say about it: a fold over ``events.jsonl``, without any I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ncclops.status.model import FaultStatus, LastEvent

Event = Mapping[str, Any]

UNCLASSIFIED = "unclassified"
# The job goes on without the store, so its loss is no fault of a rank and interrupts nothing.
STORE_LOST = "store-lost"
# What every agent of a run records; of anything else, only the agent of the node it happened on.
SEEN_BY_ALL = (STORE_LOST, "node-lost")


@dataclass
class RankFacts:
    """What events say about one rank in its present process."""

    rank: int
    host: str = ""
    pid: int | None = None
    started: float | None = None
    bootstrapped: bool = False
    warm: bool = False
    step: int | None = None  # of `step` events, which are told once a minute
    step_at: float | None = None
    step_s: float | None = None  # the mean of the minute before
    ended: bool | None = None  # None: it runs; True: it ended well
    last: LastEvent | None = None

    def add(self, event: Event) -> None:
        """Take an event about this rank into account."""
        match event["event"]:
            case "worker-started":
                self.pid, self.started = _number(event, "pid"), event["ts"]
            case "bootstrapped":
                self.bootstrapped = True
            case "compile-warmup":
                self.warm = True
            case "step":
                self.step, self.step_at = _number(event, "step"), event["ts"]
                seconds = event.get("step_s")
                self.step_s = seconds if isinstance(seconds, int | float) else None
            case "worker-exited":
                self.ended = event.get("exit_code") == 0
        self.last = LastEvent(ts=event["ts"], event=event["event"], text=_text(event))

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
    interrupted: bool = False  # a fault is behind; who restarts has not made a step yet
    between_attempts: bool = False
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    stragglers: dict[int, Event] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    last_fault: FaultStatus | None = None
    last_is_elsewhere: bool = False  # another node counts it
    verdict: Event | None = None

    def add(self, event: Event) -> None:
        """Take one event into account; what is unknown or malformed changes nothing."""
        ts, name, rank = event.get("ts"), event.get("event"), event.get("rank")
        if not isinstance(ts, int | float) or not isinstance(name, str):
            return
        self.newest = max(self.newest or ts, ts)
        if (effect := _EFFECTS.get(name)) is not None:
            effect(self, event)
        if type(rank) is int and "on" not in event:  # else it is a rank of another node
            self._rank(rank, event).add(event)

    def _rank(self, rank: int, event: Event) -> RankFacts:
        if rank not in self.ranks or event["event"] == "worker-started":
            self.ranks[rank] = RankFacts(rank)
        facts = self.ranks[rank]
        facts.host = str(event.get("node") or facts.host)
        return facts


def _run_started(run: RunFacts, event: Event) -> None:
    run.started = event["ts"]
    run.run_id = str(event.get("run_id", ""))
    run.world_size = _number(event, "world_size")


def _env_applied(run: RunFacts, event: Event) -> None:
    run.profile = event.get("profile")


def _worker_started(run: RunFacts, event: Event) -> None:
    attempt = _number(event, "attempt") or 0
    if attempt > run.attempt:
        run.iteration = 0
        run.stragglers.clear()
    run.attempt = attempt
    run.between_attempts = False


def _step(run: RunFacts, _: Event) -> None:
    run.interrupted = False


def _straggler(run: RunFacts, event: Event) -> None:
    if (rank := _number(event, "rank")) is not None:
        run.stragglers[rank] = event


def _fault(run: RunFacts, event: Event) -> None:
    cause = str(event.get("cause", ""))
    kind = cause if cause in SEEN_BY_ALL else str(event.get("kind") or UNCLASSIFIED)
    run.last_fault = FaultStatus(ts=event["ts"], rank=event.get("rank"), kind=kind, cause=cause)
    run.last_is_elsewhere = "on" in event and kind not in SEEN_BY_ALL
    if not run.last_is_elsewhere:
        run.faults[kind] += 1
    run.interrupted = run.interrupted or kind != STORE_LOST


def _classified(run: RunFacts, event: Event) -> None:
    """The attempt's failure has a class: it is the one that was counted as it happened."""
    kind, last = str(event.get("class", UNCLASSIFIED)), run.last_fault
    run.between_attempts = True
    if run.last_is_elsewhere:
        return
    if last is None or last.kind == STORE_LOST:
        last = FaultStatus(
            ts=event["ts"], rank=event.get("rank"), kind=kind, cause=str(event.get("summary", ""))
        )
    else:
        run.faults -= Counter({last.kind: 1})
        last = FaultStatus(ts=last.ts, rank=last.rank, kind=kind, cause=last.cause)
    run.last_fault = last
    run.faults[kind] += 1


def _retry(run: RunFacts, _: Event) -> None:
    run.retries += 1
    run.between_attempts = True


def _restart(run: RunFacts, event: Event) -> None:
    run.restarts += 1
    run.interrupted = True
    run.iteration = _number(event, "iteration") or run.iteration + 1
    run.stragglers.clear()
    for each in run.ranks.values():
        each.start_again()


def _stop_requested(run: RunFacts, event: Event) -> None:
    # The SIGKILL after a failed attempt's grace time is reported by this name too.
    run.stopping = run.stopping or event.get("signal") != "SIGKILL"


def _verdict(run: RunFacts, event: Event) -> None:
    run.verdict = event


_EFFECTS: Mapping[str, Callable[[RunFacts, Event], None]] = {
    "run-started": _run_started,
    "env-applied": _env_applied,
    "worker-started": _worker_started,
    "step": _step,
    "straggler": _straggler,
    "fault": _fault,
    "classified": _classified,
    "retry": _retry,
    "restart": _restart,
    "stop-requested": _stop_requested,
    "verdict": _verdict,
}

# The field that says most about an event, for a line in a table.
_SAYS_MOST = ("cause", "reason", "signal", "exit_code", "kind", "step", "seconds", "pid")


def _text(event: Event) -> str:
    for name in _SAYS_MOST:
        if (value := event.get(name)) is not None:
            said = value if isinstance(value, str) else f"{name} {value}"
            return " ".join(said.split())[:120]
    return ""


def _number(event: Event, name: str) -> int | None:
    value = event.get(name)
    return value if type(value) is int else None
