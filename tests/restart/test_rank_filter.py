"""Older names: they work, and say what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ncclops.restart import rank_assignment, rank_filter
from ncclops.restart.compose import Compose
from ncclops.restart.rank_assignment import (
    ActivateAllRanks,
    FillGaps,
    RankAssignment,
    ShiftRanks,
    World,
    local_keys,
    plan,
    supports_global_plan,
)
from ncclops.restart.state import State

TEN = World(tuple(range(10)))


@pytest.mark.parametrize(
    ("make", "new_name", "active"),
    [
        (lambda: rank_filter.WorldSizeDivisibleBy(4), "ActiveWorldSizeDivisibleBy", 8),
        (lambda: rank_filter.MaxActiveWorldSize(3), "MaxActiveWorldSize", 3),
    ],
)
def test_older_filters_filter(
    make: Callable[[], RankAssignment], new_name: str, active: int
) -> None:
    with pytest.warns(DeprecationWarning, match=f"rank_assignment.{new_name}"):
        old = make()
    assert isinstance(old, rank_assignment.RankFilter)
    assert isinstance(old, rank_filter.RankFilter)
    assert plan(old, TEN).active == active


def test_the_older_guides_assignment_works_as_written() -> None:
    """FilterGroupedByKey with a key function of rank and world size, and no activation."""
    with pytest.warns(DeprecationWarning) as warned:
        assignment = Compose(
            rank_assignment.ShiftRanks(),
            rank_assignment.FilterGroupedByKey(
                key_or_fn=lambda rank, _: rank // 8, condition=lambda count: count == 8
            ),
        )
    assert {str(w.message).split(" ")[0] for w in warned} == {
        "FilterGroupedByKey",
        "key_or_fn(rank,",
    }
    world = World(tuple(range(24))).losing([3])
    keys = {rank: local_keys(assignment, State(rank, 24)) for rank in range(24) if rank != 3}
    after = plan(assignment, world.with_keys(keys))
    assert after.initial_ranks == tuple(range(8, 24))
    assert after.active == 16
    assert rank_filter.FilterGroupedByKey is rank_assignment.FilterGroupedByKey


@pytest.mark.parametrize(
    ("given", "initial_ranks"),
    [
        (Compose(ActivateAllRanks(), ShiftRanks()), (1, 2, 3, 4, 5, 6, 7, 8, 9)),  # the default
        (Compose(ActivateAllRanks(), Compose(FillGaps())), (9, 1, 2, 3, 4, 5, 6, 7, 8)),
        (ShiftRanks(), (1, 2, 3, 4, 5, 6, 7, 8, 9)),
    ],
)
def test_rank_filter_chooses_after_the_assignment(
    given: RankAssignment, initial_ranks: tuple[int, ...]
) -> None:
    """The older guide's example: the largest multiple of 4 that is not above 7."""
    with pytest.warns(DeprecationWarning):
        filters = Compose(rank_filter.WorldSizeDivisibleBy(4), rank_filter.MaxActiveWorldSize(7))
    with pytest.warns(DeprecationWarning, match=r"rank_assignment=Compose\(f, a\)"):
        combined = rank_filter.with_rank_filter(given, filters)
    assert isinstance(combined, RankAssignment)
    assert supports_global_plan(combined)
    after = plan(combined, TEN.losing([0]))
    assert after.initial_ranks == initial_ranks
    assert after.active == 4


def test_rank_filter_with_nothing_but_activation() -> None:
    with pytest.warns(DeprecationWarning):
        combined = rank_filter.with_rank_filter(
            ActivateAllRanks(), rank_filter.MaxActiveWorldSize(2)
        )
    assert plan(combined, TEN).active == 2
