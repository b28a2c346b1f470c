"""Older names of the rank filters. They work, with a ``DeprecationWarning``.

``Wrapper(rank_filter=f, rank_assignment=a)`` meant: assign with ``a``, then choose the active
ranks with ``f``. That is ``Compose(f, a)`` now; ``with_rank_filter`` makes it so.
"""

from __future__ import annotations

import warnings

from ncclops.restart import rank_assignment
from ncclops.restart.compose import Compose
from ncclops.restart.rank_assignment import (
    ActivateAllRanks,
    FilterGroupedByKey,
    RankAssignment,
    RankFilter,
)

__all__ = [
    "FilterGroupedByKey",
    "MaxActiveWorldSize",
    "RankFilter",
    "WorldSizeDivisibleBy",
    "with_rank_filter",
]


class WorldSizeDivisibleBy(rank_assignment.ActiveWorldSizeDivisibleBy):
    """Deprecated name of ``rank_assignment.ActiveWorldSizeDivisibleBy``."""

    def __init__(self, divisor: int = 1) -> None:
        _warn_of("rank_filter.WorldSizeDivisibleBy", "rank_assignment.ActiveWorldSizeDivisibleBy")
        super().__init__(divisor)


class MaxActiveWorldSize(rank_assignment.MaxActiveWorldSize):
    """Deprecated name of ``rank_assignment.MaxActiveWorldSize``."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        _warn_of("rank_filter.MaxActiveWorldSize", "rank_assignment.MaxActiveWorldSize")
        super().__init__(max_active_world_size)


def with_rank_filter(assignment: RankAssignment, rank_filter: RankAssignment) -> RankAssignment:
    """``assignment`` followed by ``rank_filter``, with the ``DeprecationWarning`` of the latter.

    ``ActivateAllRanks`` in ``assignment`` (the present default has one) gives way to the filter.
    """
    warnings.warn(
        "Wrapper(rank_filter=f, rank_assignment=a) is deprecated: write "
        "Wrapper(rank_assignment=Compose(f, a))",
        DeprecationWarning,
        stacklevel=3,
    )
    composed: RankAssignment = Compose(rank_filter, *_without_activation(assignment))
    return composed


def _without_activation(assignment: RankAssignment) -> list[RankAssignment]:
    if isinstance(assignment, Compose):
        return [kept for part in assignment.instances for kept in _without_activation(part)]  # type: ignore[arg-type]
    return [] if isinstance(assignment, ActivateAllRanks) else [assignment]


def _warn_of(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)
