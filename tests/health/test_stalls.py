"""Windows that pass without progress are raised once, with their name."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ncclops.health.stalls import StallLimits, StallWatch
from ncclops.receipts.observation import Kind, Observation, Where

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
