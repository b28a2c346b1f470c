"""Where the time of a run went, and which share of it was training: from the run's records.

Every second between ``run-started`` and the verdict belongs to one phase:

    startup    until the workers have their process group, or a compile begins that says so
    compile    from there until warm-up is over or the first step has ended: the first contains it
    steady     steps, each for the first time
    pauses     what the script declares to take longer than a step: checkpoints
    redone     steps that a fault had made undone: numbers at or below the highest one before it
    restart    from the end of the last step before a fault until the end of the first step after it
    shutdown   from the last step until the end, or from a request to stop

The effective-time ratio is ``steady`` over all of them. ``add`` takes events (``events.jsonl``) and
receipts (``receipt.jsonl``) alike, in order of time. Receipts tell every step; events tell one a
minute (:data:`ncclops.receipts.live.STEP_PACE`), so where they are all there is, up to that much
before a fault is taken for training.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

Phase = Literal["startup", "compile", "steady", "pauses", "redone", "restart", "shutdown"]
PHASES: tuple[Phase, ...] = (
    "startup",
    "compile",
    "steady",
    "pauses",
    "redone",
    "restart",
    "shutdown",
)
# Where only one step a minute is told, the others before a fault are believed for as long.
_UNTOLD_S = timedelta(seconds=60).total_seconds()
# The first steps after a start are all told; from then on, one a minute.
_ALL_TOLD_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds in each phase; ``steps`` counts those made for the first time."""

    seconds: Mapping[Phase, float]
    steps: int
    steps_redone: int

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float | None:
        """The share of steady steps, 0 to 1; None where the run has shown no step."""
        if not self.steps or not self.total_s:
            return None
        return self.seconds["steady"] / self.total_s

    def to_json(self) -> dict[str, Any]:
        """As ``verdict.json`` and ``ncclops.status/1`` hold it."""
        return {
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "total_s": round(self.total_s, 3),
            "seconds": {phase: round(self.seconds[phase], 3) for phase in PHASES},
            "steps": self.steps,
            "steps_redone": self.steps_redone,
        }

    def line(self) -> str:
        """In one line, for the end of a run."""
        spent = sorted(
            ((self.seconds[phase], phase) for phase in PHASES if self.seconds[phase] >= 0.05),
            reverse=True,
        )
        where = ", ".join(f"{phase} {_told(seconds)}" for seconds, phase in spent)
        if self.ratio is None:
            return f"goodput: unknown, no step was seen ({where})"
        redone = f", {self.steps_redone} steps redone" if self.steps_redone else ""
        return f"goodput: {self.ratio:.1%} of {_told(self.total_s)} ({where}{redone})"


def goodput(records: Iterable[Mapping[str, Any]]) -> Goodput:
    """The goodput of a run from its records, in order of time."""
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally.result()


@dataclass
class Tally:
    """The fold behind :func:`goodput`, for a run that is under way."""

    _seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _now: float | None = None  # everything from the start to here is accounted for
    _phase: Phase = "startup"
    _attempt: int = 0
    _down: bool = False  # a fault, and nobody has said yet that the job goes on
    _ended: bool = False
    _steps: int = 0
    _redone: int = 0
    _highest: int = -1  # of all starts so far
    _last: int = -1  # since the last start
    _first_of_start: bool = True
    _of_rank: dict[Any, int] = field(default_factory=dict)  # the last step of each, likewise
    _told: int = 0  # steps known from events alone, likewise
    _paused_s: dict[Any, float] = field(default_factory=dict)  # by rank, since the last step

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record; what is unknown or malformed changes nothing."""
        ts = record.get("ts")
        if not isinstance(ts, int | float) or self._ended:
            return
        name = str(record.get("event", record.get("kind")))
        if name == "run-started":
            self._now = float(ts)
        elif self._now is not None and (effect := _EFFECTS.get(name)) is not None:
            effect(self, float(ts), record)

    def result(self, now: float | None = None) -> Goodput:
        """The goodput so far; with ``now`` (seconds since the epoch), what has not ended too."""
        seconds = dict(self._seconds)
        if now is not None and self._now is not None and not self._ended:
            seconds[self._phase] += max(0.0, now - self._now)
        return Goodput(seconds=seconds, steps=self._steps, steps_redone=self._redone)

    # --- what happens ---------------------------------------------------------------------------

    def _on_bootstrapped(self, ts: float, _: Mapping[str, Any]) -> None:
        if self._phase == "startup":
            self._spend(ts, "startup")
            self._phase = "compile"

    def _on_warmup_end(self, ts: float, record: Mapping[str, Any]) -> None:
        if self._phase not in ("startup", "compile"):
            return
        taken = record.get("seconds")
        if isinstance(taken, int | float):  # what was before it is start-up, or the compile's too
            self._spend(ts - taken, self._phase)
        self._spend(ts, "compile")
        self._phase = "compile"

    def _on_step(self, ts: float, record: Mapping[str, Any]) -> None:
        number, rank = record.get("step"), record.get("rank")
        if type(number) is not int:
            number = self._last + 1
        if number <= self._of_rank.get(rank, -1):  # the script has begun to count anew
            self._last = self._highest = -1
            self._of_rank.clear()
        self._of_rank[rank] = number
        if number <= self._last:
            return  # another rank has been faster
        self._told = self._told + 1 if "event" in record else 0
        self._count(ts, number)
        self._phase = "steady"

    def _count(self, ts: float, number: int) -> None:
        """Step ``number`` is the newest: attribute the time since the one before."""
        # Of a first step the number says nothing about those before it.
        before = number - 1 if self._first_of_start else self._last
        again = min(max(0, self._highest - before), number - before)
        self._redone += again
        self._steps += number - before - again
        share = again / (number - before)
        if self._phase in ("steady", "shutdown"):
            self._spend_pauses(ts)
            self._spend(ts - self._since(ts) * (1 - share), "redone")
            self._spend(ts, "steady")
        else:
            self._spend(ts, self._phase)
        self._paused_s.clear()
        self._last, self._first_of_start = number, False
        self._highest = max(self._highest, number)

    def _on_pause_end(self, _: float, record: Mapping[str, Any]) -> None:
        taken, rank = record.get("seconds"), record.get("rank")
        if isinstance(taken, int | float):
            self._paused_s[rank] = self._paused_s.get(rank, 0.0) + taken

    def _on_fault(self, ts: float, record: Mapping[str, Any]) -> None:
        if record.get("cause") == "store-lost":  # interrupts nobody
            return
        self._leave_steps(ts)
        self._down = True
        self._phase = "restart"

    def _on_restart(self, ts: float, _: Mapping[str, Any]) -> None:
        self._leave_steps(ts)
        self._spend(ts, "restart")
        self._begin_again()

    def _on_worker_started(self, ts: float, record: Mapping[str, Any]) -> None:
        attempt = record.get("attempt")
        if type(attempt) is int and attempt > self._attempt:
            self._attempt = attempt
            self._on_restart(ts, record)

    def _on_stop(self, ts: float, record: Mapping[str, Any]) -> None:
        if record.get("signal") == "SIGKILL":  # the end of a grace time, which need be no stop
            return
        self._leave_steps(ts)
        self._phase = "shutdown"

    def _on_verdict(self, ts: float, _: Mapping[str, Any]) -> None:
        if self._phase in ("steady", "shutdown") or self._down:
            self._leave_steps(ts)
            self._phase = "shutdown"
        self._spend(ts, self._phase)
        self._ended = True

    # --- what it means for the time ---------------------------------------------------------------

    def _begin_again(self) -> None:
        self._phase = "restart"
        self._down = False
        self._last, self._first_of_start, self._told = -1, True, 0
        self._of_rank.clear()
        self._paused_s.clear()

    def _leave_steps(self, ts: float) -> None:
        """The steps end here. Those that nobody has told are believed for a minute."""
        if self._phase == "steady":
            believed = _UNTOLD_S if self._told > _ALL_TOLD_STEPS else 0.0
            self._spend_pauses(ts)
            self._spend(min(ts, (self._now or ts) + believed), "steady")
        elif self._phase in ("startup", "compile"):
            self._spend(ts, self._phase)

    def _spend_pauses(self, ts: float) -> None:
        longest = max(self._paused_s.values(), default=0.0)
        self._spend(min(ts, (self._now or ts) + longest), "pauses")
        self._paused_s.clear()

    def _spend(self, until: float, phase: Phase) -> None:
        """Attribute the time up to ``until`` to ``phase``. Clocks that differ take nothing back."""
        self._seconds[phase] += self._since(until)
        self._now = until if self._now is None else max(self._now, until)

    def _since(self, until: float) -> float:
        return 0.0 if self._now is None else max(0.0, until - self._now)


_EFFECTS: Mapping[str, Callable[[Tally, float, Mapping[str, Any]], None]] = {
    "bootstrapped": Tally._on_bootstrapped,
    "warmup-begin": Tally._on_bootstrapped,
    "compile-warmup": Tally._on_warmup_end,
    "step": Tally._on_step,
    "phase-end": Tally._on_pause_end,
    "fault": Tally._on_fault,
    "restart": Tally._on_restart,
    "worker-started": Tally._on_worker_started,
    "stop-requested": Tally._on_stop,
    "verdict": Tally._on_verdict,
}


def of_run(run_dir: Path) -> Goodput:
    """The goodput of the run in ``run_dir``, from its events and its ranks' receipts.

    Reads every receipt of the lowest rank that has any, and of all ranks if some were lost.
    Raises ``OSError`` if there are no events to be read.
    """
    events = list(_records((run_dir / "events.jsonl").open("rb"), None))
    receipts = sorted(run_dir.glob("ranks/*/receipt.jsonl"), key=lambda path: _rank_of(path) or 0)
    lost = any(event.get("ranks_lost") for event in events)
    used = receipts if lost else receipts[:1]
    streams = [_records(path.open("rb"), _rank_of(path)) for path in used]
    return goodput(heapq.merge(sorted(events, key=_ts), *streams, key=_ts))


def _records(file: Iterable[bytes], rank: int | None) -> Iterator[dict[str, Any]]:
    for line in file:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record if rank is None else {**record, "rank": rank}


def _ts(record: Mapping[str, Any]) -> float:
    ts = record.get("ts")
    return float(ts) if isinstance(ts, int | float) else 0.0


def _rank_of(path: Path) -> int | None:
    name = path.parent.name
    return int(name) if name.isdecimal() else None


def _told(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
