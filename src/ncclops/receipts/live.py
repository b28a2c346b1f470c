"""What a run shows while it runs, made into the events worth telling.

Pure: times are seconds of one monotonic clock that the caller hands in. One object is for all
ranks of a node, over restarts in place; a new attempt has a new one.

- ``startup-stall``, ``compile-stall``  a window has passed without progress (``stalls``)
- ``compile-warmup``                    warm-up is over, once per rank and start
- ``step``                              the first steps after each start, then one a minute
- ``straggler``                         a rank that is slower than the others (``stragglers``)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from ncclops.receipts.observation import Observation
from ncclops.receipts.progress import WARM_AFTER_STEPS
from ncclops.receipts.stalls import StallWatch, Windows
from ncclops.receipts.stragglers import THRESHOLD, StepTime, Straggler, StragglerWatch

# The contaminated step and the three that make a receipt; then at this pace, since a run of weeks
# has millions. Status and metrics read the steps themselves from the ranks' pages.
_FIRST_STEPS_TOLD = 4
STEP_PACE = timedelta(seconds=60)
# A straggler is one over tens of steps: looking after each would find nothing more.
_COMPARE_EVERY_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class WatchRules:
    """What a profile says about the watch. ``straggler`` is the share above the median rank."""

    windows: Windows
    straggler: float = THRESHOLD


@dataclass(frozen=True)
class Note:
    """One event: its name, the rank it is about, its fields."""

    event: str
    rank: int | None
    fields: Mapping[str, Any] = field(default_factory=dict)


class LiveWatch:
    """Feed it what each rank shows; it answers with what is worth an event."""

    def __init__(self, rules: WatchRules, now: float) -> None:
        self._stalls = StallWatch(rules.windows, now)
        self._stragglers = StragglerWatch(threshold=rules.straggler)
        self._compared = 0  # steps since the ranks were last compared
        self._ranks: dict[int, _Rank] = {}
        self._pace = _Pace()
        self._iteration = 0

    @property
    def deadline(self) -> float | None:
        """When :meth:`check` is to be called next, if nothing is seen before."""
        return self._stalls.deadline

    def check(self, now: float) -> list[Note]:
        """The stall whose window has passed by ``now``, once."""
        stall = self._stalls.check(now)
        return [] if stall is None else [Note(stall.event, None, stall.fields())]

    def steps_printed(self, rank: int) -> int:
        """How many steps the output of ``rank`` has shown since it was last started."""
        return self._rank(rank).printed

    def saw_line(self, rank: int, seen: Observation, now: float) -> list[Note]:
        """A line that ``rank`` has printed."""
        if seen.kind == "step":
            self._rank(rank).printed += 1
        return self._saw(rank, seen, now)

    def saw_record(
        self, rank: int, seen: Observation, step_time: StepTime | None, iteration: int, now: float
    ) -> list[Note]:
        """A record that ``rank`` has written in ``iteration``."""
        if iteration > self._iteration:  # the first rank to start again; the others follow
            self._iteration = iteration
            self._pace = _Pace()
            self._stalls.restart(now)
        if seen.kind == "start":
            self._ranks[rank] = _Rank()
            return []
        notes = self._saw(rank, seen, now)
        if step_time is not None:
            notes += self._compare(rank, step_time)
        return notes

    def _rank(self, rank: int) -> _Rank:
        return self._ranks.setdefault(rank, _Rank())

    def _saw(self, rank: int, seen: Observation, now: float) -> list[Note]:
        self._stalls.saw(seen, now)
        if seen.kind == "warmup":
            return self._warm(rank, seen.seconds, stated=True)
        if seen.kind != "step":
            return []
        own = self._rank(rank)
        own.saw_step(seen.step)
        # Like the recorder: who does not say when warm-up ends is warm with the second step.
        notes = self._warm(rank, None, stated=False) if own.steps >= WARM_AFTER_STEPS else []
        if self._pace.is_due(seen.step, now):
            notes.append(Note("step", rank, _step_fields(seen)))
        return notes

    def _warm(self, rank: int, seconds: float | None, *, stated: bool) -> list[Note]:
        own = self._rank(rank)
        if own.warm:
            return []
        own.warm = True
        return [Note("compile-warmup", rank, {"seconds": seconds, "stated": stated})]

    def _compare(self, rank: int, step_time: StepTime) -> list[Note]:
        self._stragglers.saw(rank, step_time)
        self._compared += 1
        if self._compared < _COMPARE_EVERY_STEPS * len(self._ranks):
            return []
        self._compared = 0
        return [Note("straggler", each.rank, _fields(each)) for each in self._stragglers.check()]


@dataclass
class _Rank:
    """One rank since it was last started."""

    warm: bool = False
    steps: int = 0
    printed: int = 0
    highest: int = -1

    def saw_step(self, number: int | None) -> None:
        """Count a step; one that is both printed and recorded counts once."""
        number = self.highest + 1 if number is None else number
        if number > self.highest:
            self.highest = number
            self.steps += 1


class _Pace:
    """Which steps of the job become events: whichever rank is first to end one."""

    def __init__(self) -> None:
        self._highest = -1
        self._told = 0
        self._next = 0.0

    def is_due(self, number: int | None, now: float) -> bool:
        number = self._highest + 1 if number is None else number
        if number <= self._highest:
            return False
        self._highest = number
        if self._told >= _FIRST_STEPS_TOLD and now < self._next:
            return False
        self._told += 1
        self._next = now + STEP_PACE.total_seconds()
        return True


def _step_fields(seen: Observation) -> dict[str, Any]:
    known = {"step": seen.step, "seconds": seen.seconds, "rate": seen.rate, "unit": seen.unit}
    return {name: value for name, value in known.items() if value is not None}


def _fields(straggler: Straggler) -> dict[str, Any]:
    fields = asdict(straggler)
    del fields["rank"]
    return fields
