"""Comparisons of all ranks: pure functions over their statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from ncclops.health.stragglers import THRESHOLD
from ncclops.record.events import StragglerEvent
from ncclops.record.progress import UNUSUAL_STEPS
from ncclops.status.model import RankStatus, RunPhase, RunStatus, StragglerStatus

# From this ratio of its step time to the median rank's on, a rank is shown as slow.
SLOW_RATIO = 1 + THRESHOLD
# A rank that trains and has ended no step for so long, and for unusually many of the median rank's
# steps, is shown as silent. A verdict is the agent's (`health.liveness`), with more evidence.
_SILENT_S = 10.0


@dataclass(frozen=True)
class WithoutStep:
    """``ranks`` train and have ended no step for ``seconds``; None: all that train."""

    ranks: tuple[int, ...] | None
    seconds: float


def compared(status: RunStatus, known: Mapping[int, StragglerEvent] | None = None) -> RunStatus:
    """``status`` with everything that compares its ranks worked out anew.

    ``known`` has the watch's straggler events by rank: it knows since when, and how steadily.
    Of an even number of ranks the lower median is the measure, so of two ranks the faster one.
    """
    running = [rank for rank in status.ranks if not rank.is_gone]
    times = [rank.step_s for rank in running if rank.step_s is not None]
    median = median_low(times) if times else None
    steps = [rank.step for rank in running or status.ranks if rank.step is not None]
    return replace(
        status,
        median_step_s=median,
        step=min(steps, default=None),
        ranks=tuple(_with_ratio(rank, median) for rank in status.ranks),
        stragglers=_stragglers(running, known or {}),
    )


def is_silent(rank: RankStatus, status: RunStatus) -> bool:
    """Whether ``rank`` trains, and has ended no step for long, as far as steps are seen."""
    limit_s = max(_SILENT_S, UNUSUAL_STEPS * (status.median_step_s or 0.0))
    return rank.phase == "training" and rank.step_age_s is not None and rank.step_age_s > limit_s


def without_step(status: RunStatus) -> WithoutStep | None:
    """Which ranks that train have made no step for long, as far as steps are seen."""
    ages = {
        rank.rank: rank.step_age_s
        for rank in status.ranks
        if rank.phase == "training" and rank.step_age_s is not None
    }
    late = {rank.rank: ages[rank.rank] for rank in status.ranks if is_silent(rank, status)}
    if not late:
        return None
    return WithoutStep(None if len(late) == len(ages) else tuple(sorted(late)), min(late.values()))


def run_phase(ranks: Sequence[RankStatus]) -> RunPhase:
    """The phase of a run without faults, by those of its ranks.

    The first that holds for any of them: a job is as far as its last rank. What a script declares
    is part of training.
    """
    phases = {rank.phase for rank in ranks if not rank.is_gone}
    if "starting" in phases or not ranks:
        return "starting"
    if "warming-up" in phases:
        return "warming-up"
    if not phases:  # all have ended, and the verdict comes in a moment
        return "running" if all(rank.step is None for rank in ranks) else "training"
    return "running" if phases == {"running"} else "training"


def _with_ratio(rank: RankStatus, median: float | None) -> RankStatus:
    ratio = round(rank.step_s / median, 3) if rank.step_s is not None and median else None
    return replace(rank, step_ratio=ratio)


def _stragglers(
    ranks: Sequence[RankStatus], known: Mapping[int, StragglerEvent]
) -> tuple[StragglerStatus, ...]:
    own = {rank.rank: rank.own_step_s for rank in ranks if rank.own_step_s is not None}
    usual = median_low(own.values()) if len(own) > 1 else 0.0
    slow = {rank: time / usual for rank, time in own.items() if usual and time > 0}
    ratios = {rank: round(ratio, 3) for rank, ratio in slow.items() if ratio > SLOW_RATIO}
    # Steps are as long on all ranks where they wait for each other.
    waited_for = {
        rank.rank: known[rank.rank].ratio
        for rank in ranks
        if rank.rank in known and known[rank.rank].measured == "waiting"
    }
    found = [
        StragglerStatus(
            rank=rank,
            ratio=ratio,
            kind=known[rank].kind if rank in known else None,
            since_step=known[rank].since_step if rank in known else None,
        )
        for rank, ratio in (ratios | waited_for).items()
    ]
    return tuple(sorted(found, key=lambda each: -each.ratio))
