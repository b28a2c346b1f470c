"""How often a rank that was lost gets a new process."""

from __future__ import annotations

from ncclops.agent.replacements import Series

MINUTE = 60.0


def test_three_that_end_soon_are_enough() -> None:
    series = Series()
    assert [series.refuses(n * MINUTE, n) for n in range(1, 4)] == [None] * 3
    assert series.refuses(4 * MINUTE, 4) == "3 have ended within 10 minutes of their start"
    # A process that has stayed, and steps since: another cause.
    assert series.refuses(20 * MINUTE, 5) is None


def test_three_that_end_at_the_same_step_are_enough_however_long_it_takes_to_get_there() -> None:
    series = Series()
    assert [series.refuses(n * 20 * MINUTE, 7) for n in range(1, 4)] == [None] * 3
    # Its peers may be a step behind, or have begun again.
    for furthest in (7, 6, 0):
        why = series.refuses(80 * MINUTE, furthest)
        assert why == "3 have ended, and no rank has done a new step since"
    assert series.refuses(100 * MINUTE, 8) is None


def test_where_no_steps_are_reported_only_time_tells() -> None:
    series = Series()
    assert [series.refuses(n * 20 * MINUTE, None) for n in range(1, 9)] == [None] * 8
