"""Deaths and silences in the middle of a restart, and of those who watch over it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import pytest

from .conftest import LANES, Job, lanes, wait_until
from .test_faults import causes, returned_from

# Killed in ``initialize`` it leaves the others in NCCL, in the making of a communicator: that ends
# them, see docs/restart-internals.md.
PLACES = [("gloo", "finalize", 0), ("gloo", "health_check", 2), ("gloo", "initialize", 0)]
PLACES += [("nccl", "finalize", 2), ("nccl", "health_check", 0)]
THE_OTHER_RANK = [(lane, place, 2 - on) for lane, place, on in PLACES]


@pytest.mark.parametrize(
    ("lane", "place", "on"),
    [(LANES[lane], place, on) for lane, place, on in PLACES]
    + [
        pytest.param(LANES[lane], place, on, marks=pytest.mark.extended)
        for lane, place, on in THE_OTHER_RANK
    ],
    indirect=["lane"],
    ids=["-".join(map(str, each)) for each in PLACES + THE_OTHER_RANK],
)
def test_a_rank_that_is_killed_on_the_way_to_the_next_iteration(
    job: Job, place: str, on: int
) -> None:
    job.start(3, "fault_programs:dying", place=place, on=on, how="SIGKILL")
    assert job.wait() == {0: 0, 1: 0, 2: 0} | {on: -signal.SIGKILL}
    last = 2 if place == "initialize" else 1
    assert returned_from(job, last) == sorted({0, 1, 2} - {on})
    lost = {tuple(e["ranks_lost"]) for e in job.events("incident") if e["iteration"] == last - 1}
    assert lost == {(on,)}
    job.expect_no_orphans()


def test_a_signal_handler_that_raises_between_iterations_costs_no_rank(job: Job) -> None:
    """As torch's does when a worker of a data loader has died. In the function it is a fault."""
    assert job.start(2, "fault_programs:raising_in_signal_handlers").wait() == {0: 0, 1: 0}
    assert returned_from(job, 2) == [0, 1]
    assert causes(job) == {("exception", 1)}
    assert [e["handler"] for e in job.events("has", rank=1)] == ["fail"]
    log = (job.directory / "log-1").read_text()
    assert "was ignored: TimeoutError: signal 14" in log


@pytest.mark.parametrize("doomed", [[1], [2, 3]], ids=["one", "two"])
def test_ranks_that_are_killed_in_the_barrier_are_not_waited_for(
    job: Job, doomed: list[int]
) -> None:
    job.start(4, "fault_programs:waiting_in_the_barrier").wait_for("finalize", count=4)
    for rank in doomed:
        job.kill(rank)
    (job.directory / "go").touch()
    assert job.wait() == {rank: -signal.SIGKILL if rank in doomed else 0 for rank in range(4)}
    alive = sorted({0, 1, 2, 3} - set(doomed))
    assert returned_from(job, job.events("returned")[0]["value"][-1]) == alive
    job.expect_no_orphans()


@lanes("gloo", "nccl")
def test_the_rank_that_all_wait_for_in_the_barrier_is_killed(job: Job) -> None:
    job.start(3, "fault_programs:waiting_in_the_barrier").wait_for("finalize", count=3)
    job.kill(0)
    assert job.wait() == {0: -signal.SIGKILL, 1: 0, 2: 0}
    assert returned_from(job, 1) == [1, 2]
    assert {e["world"] for e in job.events("entered") if e["iteration"] == 1} == {2}
    job.expect_no_orphans()


@pytest.mark.slow
def test_a_node_that_falls_silent_is_missed_and_leaves_when_it_comes_back(job: Job) -> None:
    """Main process and monitor process stopped together: nothing closes a connection."""
    job.start(3, "fault_programs:silent").wait_for("entered", count=3)
    wait_until(
        lambda: "watching the monitor process of rank 1" in job.monitor_log(0),
        "the link to be watched",
    )
    monitor = job.monitor_process(1)
    job.kill(1, signal.SIGSTOP)
    os.kill(monitor, signal.SIGSTOP)
    job.wait_for("returned", count=2)
    assert causes(job) == {("lost", 1)}
    assert returned_from(job, 1) == [0, 2]
    os.kill(monitor, signal.SIGCONT)
    job.kill(1, signal.SIGCONT)
    assert job.wait()[1] != 0
    assert not job.events("returned", 1)
    job.expect_no_orphans()


def test_monitor_processes_do_not_outlive_a_job_of_which_nothing_else_is_left(job: Job) -> None:
    """Ranks and the store's server are gone at once: no process is left to report to."""
    job.start(3, "waiting", busy=0).wait_for("entered", count=3)
    monitors = {job.monitor_process(rank) for rank in range(3)}
    kill_all(set(job.processes()) - monitors)
    job.expect_no_orphans()


def test_a_monitor_process_that_is_left_alone_goes(job: Job) -> None:
    """A monitor process that was stopped finds its whole job gone."""
    job.start(5, "waiting", busy=0).wait_for("entered", count=5)
    last = job.kill_monitor(0, signal.SIGSTOP)
    kill_all(set(job.processes()) - {last})
    os.kill(last, signal.SIGCONT)
    job.expect_no_orphans()


def kill_all(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_rank_whose_exception_cannot_be_put_into_words_is_ended_at_the_hard_timeout(
    job: Job,
) -> None:
    """``__str__`` is the script's: what follows its function is under a timeout as well."""
    codes = job.start(2, "fault_programs:raising_what_hangs").wait()
    assert codes in ({0: 0, 1: -signal.SIGTERM}, {0: 0, 1: -signal.SIGKILL})
    assert returned_from(job, 1) == [0]
    assert {tuple(e["ranks_lost"]) for e in job.events("incident")} == {(1,)}
    job.expect_no_orphans()


def test_a_rank_whose_main_thread_could_not_start_a_thread_does_not_hold_up_the_others(
    job: Job,
) -> None:
    """Python up to 3.11 cannot interrupt that thread from then on: the rank leaves."""
    codes = job.start(2, "fault_programs:failing_to_start_a_thread").wait()
    leaves = sys.version_info < (3, 12)
    assert (codes[0], codes[1] == 0) == (0, not leaves)
    assert returned_from(job, 1) == ([0] if leaves else [0, 1])
    assert causes(job) == {("exception", 1)}
    job.expect_no_orphans()
