"""Data loaders with workers, in the middle of which a restart comes."""

from __future__ import annotations

import signal
from contextlib import suppress

import psutil
import pytest

from .conftest import Job


@pytest.mark.parametrize("how", ["plain", "generator", "persistent", "cycle", "several", "class"])
def test_workers_are_told_to_end_before_the_next_iteration(job: Job, how: str) -> None:
    """torch would wait for 5 s for each, and then end it by a signal."""
    assert set(job.start(2, "loader_programs:iterations", how=how).wait().values()) == {0}
    count = 2 * (2 if how != "several" else 4)
    assert [e["codes"] for e in job.events("ended")] == [[0] * count] * 2
    job.expect_no_orphans()


@pytest.mark.slow  # each worker imports torch
@pytest.mark.parametrize("how", ["spawn", pytest.param("forkserver", marks=pytest.mark.extended)])
@pytest.mark.extended
def test_spawned_workers_are_not_waited_for(job: Job, how: str) -> None:
    """Told to end, they leave the loader at once; the end of the interpreter takes longer."""
    assert set(job.start(2, "loader_programs:iterations", how=how).wait().values()) == {0}
    codes = {code for e in job.events("ended") for code in e["codes"]}
    assert codes <= {0, -signal.SIGKILL}, "torch would terminate them"
    job.expect_no_orphans()


def test_workers_that_are_busy_are_not_waited_for(job: Job) -> None:
    assert set(job.start(2, "loader_programs:iterations", how="busy").wait().values()) == {0}
    killed = [-signal.SIGKILL] * 4
    assert [e["codes"] for e in job.events("ended")] == [killed] * 2, "torch would terminate them"
    job.expect_no_orphans()


def test_an_iterator_that_is_held_outside_goes_on(job: Job) -> None:
    assert set(job.start(2, "loader_programs:outside").wait().values()) == {0}
    for rank in (0, 1):
        loaded = [e["items"] for e in job.events("loaded", rank)]
        assert len(loaded) == 4
        assert loaded == sorted(loaded), "nothing is loaded again"
        assert loaded[0] == [0, 0]
    assert [e["alive"] for e in job.events("workers")] == [[True] * 4] * 2
    job.expect_no_orphans()


def test_no_worker_is_left_when_the_making_of_workers_is_interrupted(job: Job) -> None:
    job.start(2, "loader_programs:starting_workers", times=25)
    job.wait_for("children", count=2)
    left = {e["rank"]: e["pids"] for e in job.events("children")}
    assert left == {0: [], 1: []}
    for rank, pid in job.pids.items():
        with suppress(psutil.NoSuchProcess):  # it may have ended by now
            found = [child.name() for child in psutil.Process(pid).children()]
            assert not any("worker" in name for name in found), rank
    assert set(job.wait().values()) == {0}
    job.expect_no_orphans()


def test_a_pass_that_has_just_begun_does_not_spoil_the_next_one(job: Job) -> None:
    """Persistent workers have answered that they begin, and the answer was not read."""
    assert set(job.start(2, "loader_programs:passes").wait().values()) == {0}
    items = job.events("items")
    assert len(items) == 10
    assert all(e["items"] == list(range(8)) for e in items)
