"""Observations of one stream summed up into the facts that the rules are applied to."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ncclops.receipts.observation import Observation, RateUnit, Where

# Rates older than this many steps no longer say how fast a run is.
_RATES_KEPT = 4096
_PROOF_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run, or of one stream of it.

    ``first`` is the step that compile may have contaminated, ``real`` the first steps after it (at
    most three), ``steps`` and ``real_steps`` how many different steps were reported, with and
    without contaminated ones. ``begun`` is any first sign of training. ``last`` is the last step.
    ``warmup_seconds`` is None where no output says how long it took. ``says_warmup`` means that the
    stream's form has a line for the end of warm-up, so that its absence says something.
    ``unproven`` is a failure that an end marker stands so close behind that it may be older.
    ``failure`` is what a run that has failed says of it in its verdict.
    """

    says_warmup: bool = False
    begun: Where | None = None
    warmup: Where | None = None
    warmup_seconds: float | None = None
    first: Where | None = None
    real: tuple[Where, ...] = ()
    first_real_step: int | None = None
    last_step: int | None = None
    last: Where | None = None
    steps: int = 0
    real_steps: int = 0
    steady_rate: float | None = None
    rate_unit: RateUnit | None = None
    peak: Where | None = None
    peak_gib: float | None = None
    end: Where | None = None
    unproven: Where | None = None
    failure: str | None = None

    @property
    def empty(self) -> bool:
        """Whether there is no sign of training at all."""
        return self.begun is None


class Tally:
    """Adds up one stream's observations, in their order.

    ``zero_based`` says how the stream counts steps, so that step 0 is known where warm-up was
    reported before it.
    """

    def __init__(self, *, zero_based: bool = True) -> None:
        self._base = 0 if zero_based else 1
        self._facts = Facts()
        self._highest: int | None = None
        self._ordinal = self._base - 1  # the last step of this segment
        self._segment_steps = 0
        self._fresh = True  # no step of this segment yet; a restart begins a new one
        self._warm_segment = False  # warm-up was reported before the very first step
        self._contaminated: int | None = None  # the last such step
        self._rates: deque[float] = deque(maxlen=_RATES_KEPT)
        self._units: Counter[RateUnit] = Counter()

    def add(self, seen: Observation) -> None:
        """Take one more observation into account."""
        match seen.kind:
            case "start":
                self._restart()
                self._facts = replace(self._facts, end=None)
            case "begun":
                self._begin(seen.where)
                self._facts = replace(self._facts, end=None)
            case "warmup":
                self._begin(seen.where)
                if self._segment_steps > 1:  # one: the first step itself was the warm-up
                    self._restart()
                self._warm_segment = self._facts.steps == 0
                self._facts = replace(
                    self._facts, warmup=seen.where, warmup_seconds=seen.seconds, end=None
                )
            case "step":
                self._begin(seen.where)
                self._add_step(seen)
            case "memory":
                self._add_memory(seen)
            case "end":
                self._facts = replace(self._facts, end=seen.where)

    def take_back_end(self) -> None:
        """What was taken for the end marker was none."""
        self._facts = replace(self._facts, end=None)

    @property
    def last_step(self) -> int | None:
        """The last step; a step that is reported again is not another one."""
        return self._facts.last_step

    @property
    def has_steps(self) -> bool:
        """Whether a step has been reported."""
        return self._highest is not None

    @property
    def facts(self) -> Facts:
        """What is known so far."""
        if not self._rates:
            return self._facts
        rate = statistics.median(self._rates)
        unit = self._units.most_common(1)[0][0]
        return replace(self._facts, steady_rate=rate, rate_unit=unit)

    def _begin(self, where: Where) -> None:
        if self._facts.begun is None:
            self._facts = replace(self._facts, begun=where)

    def _restart(self) -> None:
        self._fresh, self._warm_segment = True, False
        self._segment_steps = 0

    def _add_step(self, seen: Observation) -> None:
        number = self._ordinal + 1 if seen.step is None else seen.step
        if number < self._ordinal:  # counted back: another start, from a checkpoint or from 0
            self._restart()
        elif number == self._ordinal and not self._fresh:
            self._add_repeated(seen)
            return
        contaminated = self._fresh and (number <= self._base or not self._warm_segment)
        self._fresh, self._ordinal = False, number
        self._segment_steps += 1
        new = self._highest is None or number > self._highest
        facts = self._facts
        counts = new and not contaminated
        # In one go: there are many steps, and a copy of the facts costs as much as reading a line.
        self._facts = replace(
            facts,
            last=seen.where,
            last_step=number,
            end=None,
            steps=facts.steps + new,
            first=facts.first or seen.where if contaminated else facts.first,
            first_real_step=number
            if counts and facts.first_real_step is None
            else facts.first_real_step,
            real=(*facts.real, seen.where)[:_PROOF_STEPS] if counts else facts.real,
            real_steps=facts.real_steps + counts,
        )
        if contaminated:
            self._contaminated = number
        else:
            self._add_rate(seen)
        self._highest = number if new else self._highest

    def _add_repeated(self, seen: Observation) -> None:
        """A step reported again: by another rank, a redrawn bar, or a second line with its rate."""
        if seen.step != self._contaminated:
            self._add_rate(seen)

    def _add_rate(self, seen: Observation) -> None:
        rate, unit = seen.rate, seen.unit
        if rate is None and seen.seconds:
            rate, unit = 1 / seen.seconds, "steps/s"
        if rate is None or unit is None or not seen.undisturbed:
            return
        if self._units and unit not in self._units:
            if unit == "steps/s":
                return
            self._rates.clear()  # tokens are preferred to steps, in any order
            self._units.clear()
        self._rates.append(rate)
        self._units[unit] += 1

    def _add_memory(self, seen: Observation) -> None:
        if seen.gib is not None and seen.gib >= (self._facts.peak_gib or 0):
            self._facts = replace(self._facts, peak=seen.where, peak_gib=seen.gib)


def fill_gaps(views: Iterable[Facts]) -> Facts:
    """One account of the same run from several streams of it, the most complete one first.

    What the first lacks is taken from the others, in order, except steps: two streams may count
    them differently. An end marker counts wherever it stands.
    """
    best, *others = [*views] or [Facts()]
    for other in others:
        changes = {
            key: getattr(other, key)
            for group in _GAPS
            if getattr(best, group[0]) is None
            for key in group
        }
        best = replace(best, **changes)
    return best


def by_steps(views: Iterable[Facts]) -> list[Facts]:
    """``views`` with the one that reports most steps first: trainers print on one rank only."""
    return sorted(views, key=lambda facts: -facts.steps)


# What belongs together, the deciding one first.
_GAPS = (
    ("begun",),
    ("warmup", "warmup_seconds"),
    ("steady_rate", "rate_unit"),
    ("peak", "peak_gib"),
    ("end",),
)


def combine_ranks(views: Iterable[Facts]) -> Facts:
    """One account of a run from the records of its ranks: what holds for every one of them.

    The fewest steps, the longest warm-up, the highest peak memory; warm-up, memory and end only
    where all ranks report them. The rate is the median over ranks.
    """
    ranks = [facts for facts in views if not facts.empty]
    if not ranks:
        return Facts()
    least = min(ranks, key=lambda facts: facts.real_steps)
    warm = max(ranks, key=lambda facts: facts.warmup_seconds or 0)
    high = max(ranks, key=lambda facts: facts.peak_gib or 0)
    rates = [facts.steady_rate for facts in ranks if facts.steady_rate is not None]
    return replace(
        least,
        warmup=warm.warmup if all(facts.warmup for facts in ranks) else None,
        warmup_seconds=warm.warmup_seconds,
        steady_rate=statistics.median(rates) if rates else None,
        rate_unit=next((facts.rate_unit for facts in ranks if facts.rate_unit), None),
        peak=high.peak if all(facts.peak for facts in ranks) else None,
        peak_gib=high.peak_gib,
        end=ranks[-1].end if all(facts.end for facts in ranks) else None,
    )
