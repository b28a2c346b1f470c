"""The events worth recording, from what a run shows while it runs.

Pure: times are arguments. ``now`` is in seconds of one monotonic clock and opens and closes
windows, ``at`` is wall time, when the thing seen happened. One object is for all ranks of a node,
over restarts in place; a new attempt has a new one.

- ``startup-stall``, ``compile-stall``  a window has passed without progress (``stalls``)
- ``compile-warmup``                    warm-up is over, once per rank and start
- ``step``                              of the lowest rank that reports: the first after a start,
                                        one every ten seconds, the last before a fault or the end
- ``straggler``                         a rank that is slower than the others, by what the script
                                        says of its steps (``stragglers``) or by how little it
                                        waits for others (``paces``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from msgspec.structs import replace

from ncclops.health.paces import PaceWatch, RankPace
from ncclops.health.stalls import StallLimits, StallWatch
from ncclops.health.stragglers import THRESHOLD, RankStepTime, Straggler, StragglerWatch
from ncclops.receipts.observation import Observation, Where
from ncclops.record.events import (
    STEP_EVERY_S,
    CompileWarmupEvent,
    Event,
    StepEvent,
    StragglerEvent,
)
from ncclops.record.progress import WARM_AFTER_STEPS

# A straggler is one over tens of steps: looking after each would find nothing more.
_COMPARE_EVERY_STEPS = 10


# The agent sees a step less than so long after its end, unless it is held up.
_SAME_CLOCK_S = 1.0
_SILENT_STEP = Observation(kind="step", where=Where("", 0, ""))


@dataclass(frozen=True, kw_only=True)
class WatchRules:
    """What a profile says about the watch. ``straggler`` is the share above the median rank."""

    stall: StallLimits
    straggler: float = THRESHOLD


class LiveWatch:
    """Takes what each rank shows, and returns the events worth recording."""

    def __init__(self, rules: WatchRules, now: float) -> None:
        self._stalls = StallWatch(rules.stall, now)
        self._stragglers = StragglerWatch(threshold=rules.straggler)
        self._paces = PaceWatch(threshold=rules.straggler)
        self._waits_known = False
        self._chronic: set[int] = set()  # ranks that were said to be
        self._compared = 0  # steps since the ranks were last compared
        self._ranks: dict[int, _Rank] = {}
        self._pace = _Pace()
        self._iteration = 0
        self._recording: set[int] = set()  # ranks that report their steps

    @property
    def deadline(self) -> float | None:
        """When :meth:`check` is to be called next, if nothing is seen before."""
        return self._stalls.deadline

    def check(self, now: float) -> list[Event]:
        """The stall whose window has passed by ``now``, once."""
        stall = self._stalls.check(now)
        return [] if stall is None else [stall.as_event()]

    def steps_printed(self, rank: int) -> int:
        """How many steps the output of ``rank`` has shown since it was last started."""
        return self._rank(rank).printed

    def steps_recorded(self) -> bool:
        """Whether any rank has reported a step, in whichever of its starts."""
        return bool(self._recording)

    def saw_line(self, rank: int, seen: Observation, now: float, at: float) -> list[Event]:
        """A line that ``rank`` has printed."""
        if seen.kind == "step":
            self._rank(rank).printed += 1
            if rank in self._recording:  # it may be of an earlier start; records say of which
                return []
        return self._saw(rank, seen, now, at)

    def saw_record(
        self,
        rank: int,
        seen: Observation,
        step_time: RankStepTime | None,
        iteration: int,
        now: float,
        at: float,
    ) -> list[Event]:
        """A record that ``rank`` has written in ``iteration``."""
        found: list[Event] = []
        if iteration < self._iteration:  # written before the others started again
            return found
        if iteration > self._iteration:  # the first rank to start again; the others follow
            self._iteration = iteration
            found += self.flush()
            self._pace = _Pace()
            self._stalls.restart(now)
        if seen.kind == "start":
            # What it has printed before its first record is read is of its first start.
            if iteration > self._rank(rank).iteration:
                self._ranks[rank] = _Rank(iteration)
            return found
        if seen.kind == "step":
            self._recording.add(rank)
        found += self._saw(rank, seen, now, at)
        if step_time is not None:
            found += self._compare(rank, step_time)
        return found

    def saw_pace(self, pace: RankPace, elsewhere: Sequence[RankPace]) -> list[Event]:
        """``pace`` of a rank is new; ``elsewhere`` is what is known of other nodes' ranks."""
        if pace.iteration < self._iteration:
            return []
        self._waits_known = True
        return self._say(self._paces.saw(pace, elsewhere))

    def suspected(self, rank: int) -> bool:
        """Whether ``rank`` seems slow at the moment."""
        return self._paces.suspected(rank)

    def finish(self) -> list[Event]:
        """The ranks have ended: slow ones of a run that was too short to say so while it ran."""
        return self._say(self._paces.finish())

    def trains(self, now: float) -> None:
        """Another source knows that steps are made, although none is printed or recorded."""
        self._stalls.saw(_SILENT_STEP, now)

    def flush(self) -> list[Event]:
        """The last step that was seen, if it is not recorded yet: something comes to an end."""
        return self._pace.flush()

    def _rank(self, rank: int) -> _Rank:
        return self._ranks.setdefault(rank, _Rank())

    def _saw(self, rank: int, seen: Observation, now: float, at: float) -> list[Event]:
        self._stalls.saw(seen, now)
        if seen.kind == "warmup":
            return self._warm(rank, seen.seconds, at, stated=True)
        if seen.kind != "step":
            return []
        own = self._rank(rank)
        own.saw_step(seen.step)
        # As in the recorder: without a report of its end, warm-up is over with the second step.
        warm = own.steps >= WARM_AFTER_STEPS
        found = self._warm(rank, None, at, stated=False) if warm else []
        number = own.highest if seen.step is None else seen.step
        shown = StepEvent(
            ts=at, rank=rank, step=number, step_s=seen.seconds, rate=seen.rate, unit=seen.unit
        )
        return found + self._pace.saw(rank, shown, now)

    def _warm(self, rank: int, seconds: float | None, at: float, *, stated: bool) -> list[Event]:
        own = self._rank(rank)
        if own.warm:
            return []
        own.warm = True
        return [CompileWarmupEvent(ts=at, rank=rank, seconds=seconds, stated=stated)]

    def _compare(self, rank: int, step_time: RankStepTime) -> list[Event]:
        if self._waits_known and step_time.busy_s is None:
            return []  # how long it waits says more than how long its steps are
        self._stragglers.saw(rank, step_time)
        self._compared += 1
        if self._compared < _COMPARE_EVERY_STEPS * len(self._ranks):
            return []
        self._compared = 0
        return self._say(self._stragglers.check())

    def _say(self, found: Sequence[Straggler]) -> list[Event]:
        """Each chronic straggler once, whatever has found it."""
        new = [each for each in found if each.kind == "over" or each.rank not in self._chronic]
        self._chronic |= {each.rank for each in new if each.kind == "chronic"}
        self._chronic -= {each.rank for each in new if each.kind == "over"}
        return [StragglerEvent(**asdict(each)) for each in new]


@dataclass
class _Rank:
    """One rank since it was last started."""

    iteration: int = 0  # of that start
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
    """Which steps become events: of one start, and of one rank."""

    def __init__(self) -> None:
        self._leader: int | None = None
        self._recorded: _SeenStep | None = None
        self._last: _SeenStep | None = None  # seen since, and not recorded

    def saw(self, rank: int, shown: StepEvent, now: float) -> list[Event]:
        if self._leader is not None and rank > self._leader:
            return []
        self._leader = rank
        if self._recorded is not None and shown.step <= self._recorded.event.step:
            return []  # another rank led so far, or it is printed and recorded
        if self._last is not None and shown.step <= self._last.event.step:
            return []
        self._last = _SeenStep(shown, now)
        if self._recorded is None or (self._last.since(self._recorded) or 0.0) >= STEP_EVERY_S:
            return self.flush()
        return []

    def flush(self) -> list[Event]:
        last, self._last = self._last, None
        if last is None:
            return []
        before, self._recorded = self._recorded, last
        if before is None:
            return [last.event]
        elapsed_s, steps = last.since(before), last.event.step - before.event.step
        mean_s = None if elapsed_s is None else round(elapsed_s / steps, 6)
        return [replace(last.event, step_s=mean_s)]


@dataclass(frozen=True)
class _SeenStep:
    event: StepEvent
    seen_at: float  # by a monotonic clock, sometimes long after its end

    def since(self, before: _SeenStep) -> float | None:
        """Seconds between the ends of two steps, by when they were seen where the host's clock was
        set in between; None where that does not tell them apart."""
        by_clock, seen = self.event.ts - before.event.ts, self.seen_at - before.seen_at
        if by_clock >= 0 and abs(by_clock - seen) < _SAME_CLOCK_S:
            return by_clock
        return seen if seen > 0 else None
