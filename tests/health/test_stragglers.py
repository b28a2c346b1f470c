"""A slow rank is found, named with what it costs, and distinguished from a single slow episode."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from ncclops.health.stragglers import (
    ADVICE,
    RankStepTime,
    StragglerWatch,
    find_stragglers,
    step_time_in,
)
from ncclops.record.receipt_records import EndRecord, StepRecord

Times = dict[int, list[RankStepTime]]


def run(
    ranks: int = 4,
    steps: int = 60,
    seconds: Callable[[int, int], float] = lambda rank, step: 1.0,
    **fields: bool,
) -> Times:
    """Step times of a job: ``seconds(rank, step)`` with 1 % of noise."""
    noise = random.Random(7)
    return {
        rank: [
            RankStepTime(
                step=step,
                seconds=seconds(rank, step) * noise.uniform(0.99, 1.01),
                at=1000.0 + step,
                **fields,
            )
            for step in range(steps)
        ]
        for rank in range(ranks)
    }


def test_equal_ranks_have_no_straggler() -> None:
    assert find_stragglers(run()) == []


def test_a_rank_eight_percent_behind_is_chronic_and_the_advice_is_to_swap() -> None:
    (found,) = find_stragglers(run(seconds=lambda rank, step: 1.08 if rank == 2 else 1.0))
    assert found.rank == 2
    assert found.kind == "chronic"
    assert 1.07 < found.ratio < 1.09
    assert found.since_step == 10, "as far back as the window looks"
    assert found.steps_compared == 50
    assert found.advice == ADVICE
    assert "Swap the GPU" in found.advice


def test_three_percent_is_noise_and_the_threshold_is_the_profile_s() -> None:
    times = run(seconds=lambda rank, step: 1.03 if rank == 2 else 1.0)
    assert find_stragglers(times) == []
    assert [found.rank for found in find_stragglers(times, threshold=0.015)] == [2]


def test_since_when() -> None:
    late = run(steps=100, seconds=lambda rank, step: 1.2 if rank == 1 and step >= 58 else 1.0)
    (found,) = find_stragglers(late)
    assert (found.kind, found.since_step, found.since) == ("chronic", 58, 1058.0)


def test_a_single_slow_episode_is_distinguished() -> None:
    times = run(seconds=lambda rank, step: 1.5 if rank == 3 and 30 <= step < 36 else 1.0)
    (found,) = find_stragglers(times)
    assert (found.kind, found.since_step, found.steps_slow) == ("one-off", 30, 6)
    assert "Swap" not in found.advice


def test_single_slow_steps_are_nothing() -> None:
    assert find_stragglers(run(seconds=lambda rank, step: 2.0 if step % 10 == rank else 1.0)) == []


def test_what_slows_all_ranks_makes_none_a_straggler() -> None:
    assert find_stragglers(run(seconds=lambda rank, step: 5.0 if step > 40 else 1.0)) == []


def test_the_first_step_and_disturbed_ones_are_never_compared() -> None:
    compile_skew = run(steps=12, seconds=lambda rank, step: 90.0 if step == 0 and rank else 1.0)
    assert find_stragglers(compile_skew) == []
    times = run()
    times[0] = [
        RankStepTime(step=t.step, seconds=30.0, at=t.at, disturbed=True)
        if t.step in range(20, 30)
        else t
        for t in times[0]
    ]
    assert find_stragglers(times) == []


def test_own_time_shows_the_slow_rank_when_collectives_make_all_steps_equal() -> None:
    times = {
        rank: [
            RankStepTime(step=step, seconds=1.2, at=step, busy_s=1.1 if rank == 1 else 0.9)
            for step in range(40)
        ]
        for rank in range(4)
    }
    (found,) = find_stragglers(times)
    assert found.rank == 1
    assert found.ratio == 1.222


def test_of_two_ranks_the_slower_one_is_found() -> None:
    (found,) = find_stragglers(run(ranks=2, seconds=lambda rank, step: 1.3 if rank else 1.0))
    assert found.rank == 1


def test_too_little_to_compare_is_no_finding() -> None:
    slow = {"seconds": lambda rank, step: 2.0 if rank else 1.0}
    assert find_stragglers(run(steps=8, **slow)) == []  # type: ignore[arg-type]
    assert find_stragglers(run(ranks=1)) == []
    assert find_stragglers({}) == []


def test_ranks_that_report_different_steps_are_compared_on_common_ones() -> None:
    times = run(seconds=lambda rank, step: 1.2 if rank == 2 else 1.0)
    times[1] = times[1][::2]
    (found,) = find_stragglers(times)
    assert found.steps_compared == 29


def test_the_watch_says_a_finding_once_and_again_after_a_recovery() -> None:
    watch = StragglerWatch()
    slow_until, slow_from = 60, 150
    said = []
    for step in range(220):
        slow = step < slow_until or step >= slow_from
        for rank in range(3):
            seconds = 1.2 if rank == 1 and slow else 1.0
            watch.saw(rank, RankStepTime(step=step, seconds=seconds, at=float(step)))
        said += [(step, found.rank, found.kind) for found in watch.check()]
    assert [rank for _, rank, _ in said] == [1] * len(said)
    assert [kind for _, _, kind in said] == ["chronic", "one-off", "chronic"]
    assert said[0][0] < 15
    assert said[1][0] >= slow_from


def test_a_rank_that_is_read_late_makes_no_finding_new() -> None:
    watch = StragglerWatch()
    said = []
    for step in range(80):
        for rank in range(3):
            if rank < 2 or step >= 40:
                seconds = 1.2 if rank == 1 else 1.0
                watch.saw(rank, RankStepTime(step=step, seconds=seconds, at=float(step)))
        said += [(found.rank, found.kind) for found in watch.check()]
    assert said == [(1, "chronic")]


def test_step_times_from_records() -> None:
    record = StepRecord(ts=5.0, step=3, seconds=0.5, busy_s=0.4)
    assert step_time_in(record) == RankStepTime(step=3, seconds=0.5, at=5.0, busy_s=0.4)
    first = step_time_in(StepRecord(ts=5.0, step=3, seconds=0.5, first=True))
    assert first is not None
    assert first.disturbed
    for other in (EndRecord(ts=5.0), StepRecord(ts=5.0, step=0)):
        assert step_time_in(other) is None


@given(st.dictionaries(st.integers(0, 3), st.lists(st.floats(0, 1e6), max_size=30), max_size=4))
def test_any_times_are_taken(values: dict[int, list[float]]) -> None:
    times = {
        rank: [RankStepTime(step=n, seconds=value, at=float(n)) for n, value in enumerate(entries)]
        for rank, entries in values.items()
    }
    for found in find_stragglers(times):
        assert found.ratio > 1.05
