"""Windows that pass without progress are raised once, with their name."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ncclops.health.evidence import Reading
from ncclops.health.stalls import RestartWatch, StallLimits, StallWatch
from ncclops.receipts.observation import Kind, Observation, Where
from ncclops.record.progress import RESTART_PHASE

LIMITS = StallLimits(startup=timedelta(seconds=100), compile=timedelta(minutes=10))


def seen(kind: Kind) -> Observation:
    return Observation(kind=kind, where=Where("log", 1, kind))


def test_startup_without_a_sign_of_training() -> None:
    watch = StallWatch(LIMITS, now=50.0)
    assert watch.deadline == 150.0
    assert watch.check(149.9) is None
    stall = watch.check(150.0)
    assert stall is not None
    assert (stall.event, stall.window_name) == ("startup-stall", "startup")
    assert stall.as_event().message == (
        "the startup window of 100s has passed without a sign of training"
    )
    assert watch.check(1000.0) is None, "raised once"
    assert watch.deadline is None


def test_compile_has_a_window_of_its_own() -> None:
    watch = StallWatch(LIMITS, now=0.0)
    watch.saw(seen("begun"), 90.0)
    watch.saw(seen("begun"), 400.0)
    assert watch.deadline == 690.0, "a compile that talks has no longer window"
    stall = watch.check(700.0)
    assert stall is not None
    assert (stall.event, stall.began) == ("compile-stall", 90.0)
    assert stall.as_event().window_s == 600.0


@pytest.mark.parametrize("kind", ["warmup", "step", "end"])
def test_progress_closes_the_windows(kind: Kind) -> None:
    watch = StallWatch(LIMITS, now=0.0)
    watch.saw(seen("begun"), 90.0)
    watch.saw(seen(kind), 100.0)
    assert watch.deadline is None
    assert watch.check(1e9) is None


def test_a_late_start_is_raised_and_the_compile_still_watched() -> None:
    watch = StallWatch(LIMITS, now=0.0)
    assert watch.check(200.0) is not None
    watch.saw(seen("begun"), 300.0)
    assert watch.check(900.0) is not None


def test_a_restart_opens_the_windows_again() -> None:
    watch = StallWatch(LIMITS, now=0.0)
    watch.saw(seen("step"), 10.0)
    watch.saw(seen("start"), 500.0)
    assert watch.deadline == 600.0


def restarting(rank: int, seconds: float, *, left: bool, iteration: int = 0) -> Reading:
    age = timedelta(seconds=seconds)
    return Reading(rank=rank, iteration=iteration, phase=RESTART_PHASE, phase_age=age, left=left)


def test_a_restart_that_waits_for_a_rank_is_told_of_once() -> None:
    watch = RestartWatch()
    waiting = restarting(0, 40, left=True)
    assert watch.look([restarting(0, 20, left=True), restarting(1, 20, left=False)]) is None
    stall = watch.look([waiting, restarting(1, 40, left=False)])
    assert stall is not None
    assert (stall.ranks, stall.after_s) == ([1], 40.0)
    assert stall.message == (
        "rank 1 has not left the script 40 s after a fault, and the restart in place waits for it"
    )
    assert watch.look([restarting(0, 70, left=True), restarting(1, 70, left=False)]) is None
    again = [restarting(rank, 31, left=False, iteration=1) for rank in (0, 1)]
    stall = watch.look(again)
    assert stall is not None
    assert stall.ranks == [0, 1]


def test_a_rank_whose_process_was_stopped_is_waited_for_in_a_restart() -> None:
    stopped = Reading(rank=1, iteration=0)
    stall = RestartWatch().look([restarting(0, 40, left=True), stopped])
    assert stall is not None
    assert stall.ranks == [1]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(restarting(1, 40, left=True), id="has left, too"),
        pytest.param(Reading(rank=1, iteration=1), id="runs the script again"),
        pytest.param(Reading(rank=1, iteration=0, ended=True), id="had come to the end"),
        pytest.param(Reading(rank=1), id="reports nothing"),
    ],
)
def test_a_restart_waits_for_no_rank_that(other: Reading) -> None:
    assert RestartWatch().look([restarting(0, 40, left=True), other]) is None
