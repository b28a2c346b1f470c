"""Lists of ranks are short, and say exactly which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ncclops.rank_lists import rank_list, ranks_named


def test_three_and_more_in_a_row_are_a_range() -> None:
    assert rank_list([3, 1, 0]) == "0, 1, 3"
    assert rank_list([7, 3, 4, 5]) == "3-5, 7"
    assert rank_list([]) == ""


def test_one_rank_is_named_in_the_singular() -> None:
    assert ranks_named([4]) == "rank 4"
    assert ranks_named([4, 5]) == "ranks 4, 5"


@given(st.sets(st.integers(0, 200)))
def test_no_rank_is_lost_or_added(ranks: set[int]) -> None:
    found: set[int] = set()
    for part in filter(None, rank_list(ranks).split(", ")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == ranks
