"""How often: from measured times to an interval that all ranks share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.restart.snapshot._pace import (
    FIRST_INTERVAL,
    LONGEST_INTERVAL,
    Cost,
    Meter,
    Often,
    interval,
)

times = st.floats(0.0001, 100)


def test_the_dearest_rank_and_the_budget_decide() -> None:
    cheap, dear = Cost(1.0, 0.01, 0.2), Cost(1.0, 0.1, 0.2)
    assert interval([cheap], 0.02) == 1
    assert interval([cheap, dear], 0.02) == 5


def test_no_snapshot_is_due_before_the_last_one_is_complete() -> None:
    assert interval([Cost(1.0, 0.0, 7.5)], 0.02) == 8


def test_the_environment_has_the_last_word() -> None:
    given = Often(3, 0.02)
    asked = [given.as_asked(text) for text in (None, "auto", "10", "5%", "0.5%")]
    assert asked == [
        given,
        Often(None, 0.02),
        Often(10, 0.02),
        Often(None, 0.05),
        Often(None, 0.005),
    ]


@pytest.mark.parametrize("text", ["", "0", "-1", "often", "0%", "101%", "%", "nan%", "1.5"])
def test_what_is_no_frequency_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"NCCLOPS_SNAPSHOT_EVERY=.*: not a number of steps"):
        Often(3, 0.02).as_asked(text)


def test_without_an_ordinary_step_the_interval_stays() -> None:
    assert interval([Cost(0.0, 5.0, 5.0)], 0.02) == FIRST_INTERVAL
    assert interval([Cost(0.0, 5.0, 5.0)], 0.02, before=40) == 40


@given(st.lists(st.builds(Cost, times, times, times), min_size=1, max_size=9), st.floats(0.001, 1))
def test_the_cost_of_any_rank_stays_within_the_budget(costs: list[Cost], budget: float) -> None:
    steps = interval(costs, budget)
    assert 1 <= steps <= LONGEST_INTERVAL
    typical = sorted(each.step_s for each in costs)[len(costs) // 2]
    if steps < LONGEST_INTERVAL and len({each.step_s for each in costs}) == 1:
        assert max(each.cost_s for each in costs) <= budget * steps * typical * (1 + 1e-6) + 1e-9


def run(meter: Meter, now: float, step_s: float, take_s: float, *, busy: bool) -> float:
    """One step and one call of ``take``; the time after it."""
    entered = now + step_s
    meter.step_ended(entered, busy=busy)
    meter.call_ended(entered, entered + take_s)
    return entered + take_s


def test_the_cost_is_the_call_and_what_later_steps_are_slower() -> None:
    meter, now = Meter(), 0.0
    for _ in range(5):
        now = run(meter, now, 1.0, 0.0, busy=False)
    entered = now + 1.0
    meter.step_ended(entered, busy=False)
    meter.began(entered)
    meter.call_ended(entered, entered + 0.25)
    now = run(meter, entered + 0.25, 1.5, 0.0, busy=True)
    cost = meter.cost(now)
    assert (cost.step_s, cost.cost_s, cost.busy_s) == (1.0, 0.75, 1.75)
    assert meter.total_cost_s == 0.75


def test_what_is_allocated_once_counts_in_the_total_and_not_in_the_interval() -> None:
    meter = Meter()
    meter.began(0.0)
    meter.call_ended(0.0, 3.0)
    meter.comes_once(2.5)
    assert meter.cost(3.0).cost_s == 0.5
    assert meter.total_cost_s == 3.0


def test_one_slow_snapshot_is_an_exception() -> None:
    meter, seen = Meter(), []
    for took in (0.1, 9.0, 0.1):
        meter.began(0.0)
        meter.call_ended(0.0, took)
        seen.append(meter.cost(0.0).cost_s)
    assert seen == [0.1, 0.1, 0.1]
