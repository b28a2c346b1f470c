"""Which ranks one would look at first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

from ncclops.status.compare import SLOW_RATIO, is_silent
from ncclops.status.model import RankStatus, RunStatus


class Concern(IntEnum):
    """What is to be seen of a rank, the worst first."""

    FAILED = 0
    SILENT = 1
    SLOW = 2
    NONE = 3


def concern(rank: RankStatus, status: RunStatus, stragglers: Collection[int]) -> Concern:
    """What there is to see of ``rank``; ``stragglers`` are those that the status names."""
    if rank.phase == "failed":
        return Concern.FAILED
    if status.phase in ("ended", "lost"):
        return Concern.NONE
    if is_silent(rank, status):
        return Concern.SILENT
    if rank.rank in stragglers or (rank.step_ratio is not None and rank.step_ratio > SLOW_RATIO):
        return Concern.SLOW
    return Concern.NONE


def concerns(status: RunStatus) -> dict[int, Concern]:
    """The same of all ranks."""
    stragglers = {each.rank for each in status.stragglers}
    return {rank.rank: concern(rank, status, stragglers) for rank in status.ranks}


def worst_first(status: RunStatus, seen: dict[int, Concern]) -> Sequence[RankStatus]:
    """The ranks, those of most concern first, else by number.

    Of silent ones that with the lowest step is first: the others wait for it. Of slow ones they
    are by number, so that rows do not change places with each step.
    """

    def key(rank: RankStatus) -> tuple[int, int, int]:
        behind = rank.step if seen[rank.rank] is Concern.SILENT and rank.step is not None else 0
        return seen[rank.rank], behind, rank.rank

    return sorted(status.ranks, key=key)
