"""Ranks that are slower than the others, step after step: pure functions over step times.

Compared are the times of the same step on all ranks, so a step that is slow everywhere (a
checkpoint, a longer batch) makes no rank a straggler. What is compared should be the time a rank
was busy itself (``receipt.step(..., busy=…)``) where it is known: collectives make the step of
every rank as long as the slowest one's.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ncclops.record.receipt_records import ReceiptRecord, StepRecord

ADVICE = (
    "Swap the GPU (or move the rank to another host) and compare again: a rank that stays a few"
    " percent behind over clean retries is physical, and no setting cures it."
)
_WATCH = "A single episode: nothing to do unless it comes back."

# All ranks wait for the slowest, so one that is five percent behind costs the job five percent;
# from there on operators look into it.
THRESHOLD = 0.05
# Steps to look back on; few enough that a swapped GPU is off the list soon.
WINDOW_STEPS = 50
_LEAST_STEPS = 10
# Chronic: slow in four of five steps. One-off: slow in a run of steps, but not most of the time.
_CHRONIC_SHARE = 0.8
_EPISODE_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class RankStepTime:
    """One step of one rank. ``at`` is when it ended, in seconds since the epoch.

    ``busy_s`` is the rank's own time in it, where known. ``disturbed`` means that a phase was
    declared in it, or that it is the first after a start: such a step is never compared.
    """

    step: int
    seconds: float
    at: float
    busy_s: float | None = None
    disturbed: bool = False


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that is ``ratio`` times as slow as the median rank since step ``since_step``.

    ``measured`` is what was compared, ``over_s`` for how long it was slow. ``over``: it was.
    """

    rank: int
    ratio: float
    kind: Literal["chronic", "one-off", "over"]
    since_step: int
    since: float
    steps_slow: int
    steps_compared: int
    advice: str
    measured: Literal["waiting", "busy", "step"] = "step"
    over_s: float = 0.0


def step_time_in(record: ReceiptRecord) -> RankStepTime | None:
    """The step time in a record of ``receipt.jsonl``; None if it holds none."""
    if not isinstance(record, StepRecord) or record.seconds is None:
        return None
    return RankStepTime(
        step=record.step,
        seconds=record.seconds,
        at=record.ts,
        busy_s=record.busy_s,
        disturbed=record.disturbed,
    )


class StragglerWatch:
    """Remembers the last steps of each rank and says each finding once.

    A rank is said again after it has been found well, or when a one-off has become chronic.
    """

    def __init__(self, *, threshold: float = THRESHOLD, window_steps: int = WINDOW_STEPS) -> None:
        self._threshold = threshold
        self._window_steps = window_steps
        self._times: dict[int, deque[RankStepTime]] = {}
        self._said: dict[int, str] = {}

    def saw(self, rank: int, step_time: RankStepTime) -> None:
        """Take a rank's next step into account."""
        # One more than is compared, as the oldest is taken for a first step; and ranks are
        # not read at the same time, so a few in addition.
        kept = deque[RankStepTime](maxlen=2 * self._window_steps)
        self._times.setdefault(rank, kept).append(step_time)

    def check(self) -> list[Straggler]:
        """Findings that are new since the last check."""
        times = {rank: list(kept) for rank, kept in self._times.items()}
        steps = _comparable(times, self._window_steps)
        if not _suffices(times, steps):
            return []  # a rank that has just come, or come back: that alone proves nothing
        found = _find(times, steps, self._threshold)
        new = [each for each in found if self._said.get(each.rank) not in (each.kind, "chronic")]
        self._said = {each.rank: self._strongest(each) for each in found}
        return new

    def _strongest(self, found: Straggler) -> str:
        return "chronic" if self._said.get(found.rank) == "chronic" else found.kind


def find_stragglers(
    times: Mapping[int, Sequence[RankStepTime]],
    *,
    threshold: float = THRESHOLD,
    window_steps: int = WINDOW_STEPS,
) -> list[Straggler]:
    """The stragglers among the ranks of ``times``, slowest first.

    Looks at the last ``window_steps`` steps that all ranks have, at least ten, without the first of
    each rank and without disturbed ones. Of an even number of ranks the lower median is the
    measure, so of two ranks the faster one.
    """
    steps = _comparable(times, window_steps)
    return _find(times, steps, threshold) if _suffices(times, steps) else []


def _suffices(times: Collection[int], steps: Sequence[_Step]) -> bool:
    return len(times) >= 2 and len(steps) >= _LEAST_STEPS


def _find(ranks: Iterable[int], steps: Sequence[_Step], threshold: float) -> list[Straggler]:
    found = [_look_at(rank, steps, threshold) for rank in ranks]
    return sorted((each for each in found if each), key=lambda each: -each.ratio)


@dataclass(frozen=True)
class _Step:
    """One step on all ranks: own time over what the others take, per rank."""

    step: int
    ended: Mapping[int, float]
    ratios: Mapping[int, float]
    by_busy: bool


def _comparable(times: Mapping[int, Sequence[RankStepTime]], window_steps: int) -> list[_Step]:
    by_rank = {rank: _undisturbed(entries) for rank, entries in times.items()}
    common = set.intersection(*(set(entries) for entries in by_rank.values())) if by_rank else set()
    compared = []
    for number in sorted(common)[-window_steps:]:
        entries = {rank: by_rank[rank][number] for rank in by_rank}
        by_busy = all(entry.busy_s is not None for entry in entries.values())
        own = _own_seconds(entries) if by_busy else _seconds(entries)
        usual = _usual(list(own.values()))
        if usual > 0:
            ended = {rank: entry.at for rank, entry in entries.items()}
            ratios = {rank: seconds / usual for rank, seconds in own.items()}
            compared.append(_Step(number, ended, ratios, by_busy))
    return compared


def _undisturbed(entries: Sequence[RankStepTime]) -> dict[int, RankStepTime]:
    """By number, without the first: it contains the compile. Of a step done twice, the last."""
    return {entry.step: entry for entry in entries[1:] if not entry.disturbed}


def _own_seconds(entries: Mapping[int, RankStepTime]) -> dict[int, float]:
    return {rank: entry.busy_s or 0.0 for rank, entry in entries.items()}


def _seconds(entries: Mapping[int, RankStepTime]) -> dict[int, float]:
    return {rank: entry.seconds for rank, entry in entries.items()}


def _usual(seconds: Sequence[float]) -> float:
    # The lower median: with an even number of ranks, the slow ones do not set the measure.
    return statistics.median_low(seconds)


def _look_at(rank: int, steps: Sequence[_Step], threshold: float) -> Straggler | None:
    slow = [step.ratios[rank] > 1 + threshold for step in steps]
    chronic = sum(slow) >= _CHRONIC_SHARE * len(steps)
    begin = _since(slow) if chronic else _episode(slow)
    if begin is None:
        return None
    ratios = [step.ratios[rank] for step, is_slow in zip(steps, slow, strict=True) if is_slow]
    return Straggler(
        rank=rank,
        ratio=round(statistics.median(ratios), 3),
        kind="chronic" if chronic else "one-off",
        since_step=steps[begin].step,
        since=steps[begin].ended[rank],
        steps_slow=sum(slow),
        steps_compared=len(steps),
        advice=ADVICE if chronic else _WATCH,
        measured="busy" if steps[-1].by_busy else "step",
        over_s=round(max(0.0, steps[-1].ended[rank] - steps[begin].ended[rank]), 3),
    )


def _since(slow: Sequence[bool]) -> int:
    """Where the time begins, up to the end, of which four fifths are slow."""
    count = 0
    begin = len(slow) - 1
    for back, is_slow in enumerate(reversed(slow), start=1):
        count += is_slow
        if is_slow and count >= _CHRONIC_SHARE * back:
            begin = len(slow) - back
    return begin


def _episode(slow: Sequence[bool]) -> int | None:
    """Where the last run of slow steps that is long enough begins, if there is one."""
    length = 0
    found = None
    for index, is_slow in enumerate(slow):
        length = length + 1 if is_slow else 0
        if length >= _EPISODE_STEPS:
            found = index - length + 1
    return found
