"""Faults that meet a rank where it is hard to interrupt, or in another restart."""

from __future__ import annotations

import signal

import pytest
from torch import distributed as dist

from .conftest import Job, lanes, lanes_with
from .test_faults import causes, returned_from


def iterations(job: Job, rank: int) -> list[int]:
    return [e["iteration"] for e in job.events("entered", rank)]


@pytest.mark.parametrize(
    "where",
    [
        "del",
        "except",
        "swallowing",
        "suppressing",
        "clean-up",
        "generator-exit",
        "cancellation",
        "task-group",
        "c-callback",
        "extension",
        "executor",
        "exit-stack",
    ],
)
def test_wherever_the_interruption_lands_it_makes_one_restart(job: Job, where: str) -> None:
    assert job.start(2, "fault_programs:awkward", where=where).wait() == {0: 0, 1: 0}
    assert iterations(job, 0) == iterations(job, 1) == [0, 1]
    assert not job.events("survived")
    assert causes(job) == {("exception", 0)}
    assert all(e["faulty_ranks"] == [0] for e in job.events("incident"))
    job.expect_no_orphans()


@pytest.mark.extended
def test_the_others_go_on_without_a_rank_that_swallows_the_interruption_without_an_end(
    job: Job,
) -> None:
    codes = job.start(2, "fault_programs:awkward", where="endless-swallowing").wait()
    assert codes in ({0: 0, 1: -signal.SIGTERM}, {0: 0, 1: -signal.SIGKILL})
    assert iterations(job, 0) == [0, 1]
    assert causes(job) == {("exception", 0)}
    job.expect_no_orphans()


def test_the_time_a_function_takes_to_end_is_a_phase(job: Job) -> None:
    assert job.start(2, "fault_programs:awkward", where="exit-stack").wait() == {0: 0, 1: 0}
    leave = {e["initial_rank"]: e["phases_ms"]["leave"] for e in job.events("incident")}
    barrier = {e["initial_rank"]: e["phases_ms"]["barrier"] for e in job.events("incident")}
    assert leave[1] >= max(1000, leave[0]), "five context managers, 0.2 s each"
    assert barrier[0] >= 500, "the other rank waits for that"


def test_an_exception_while_another_restart_is_in_progress_is_part_of_that(job: Job) -> None:
    assert set(job.start(3, "fault_programs:raising_in_clean_up").wait().values()) == {0}
    assert all(iterations(job, rank) == [0, 1] for rank in range(3))
    incidents = job.events("incident")
    assert causes(job) == {("exception", 0)}
    assert any("the second" in fault["summary"] for e in incidents for fault in e["faults"])
    assert not any(e["holds"] for e in job.events("entered")), "its frames are released"


def test_a_wait_on_a_store_ends_while_another_thread_was_connecting(job: Job) -> None:
    """And one on a store of the script's own, which goes on in the next iteration."""
    job.start(2, "fault_programs:connecting_while_another_thread_does")
    assert set(job.wait().values()) == {0}
    assert iterations(job, 0) == iterations(job, 1) == [0, 1]


def test_a_group_that_the_abort_has_missed_does_not_fail_the_next_iteration(job: Job) -> None:
    assert set(job.start(2, "fault_programs:leaving_a_group_behind").wait().values()) == {0}
    assert iterations(job, 0) == iterations(job, 1) == [0, 1]


def test_an_abort_that_hangs_costs_its_rank_where_it_holds_the_main_thread(job: Job) -> None:
    """Long before the soft timeout."""
    codes = job.start(3, "fault_programs:hanging_in_the_abort").wait()
    assert codes == {0: -signal.SIGTERM, 1: 0, 2: 0}
    assert returned_from(job, 1) == [1, 2]
    assert causes(job) == {("exception", 2)}
    assert "the abort of its process groups has not returned for" in job.monitor_log(0)


def test_each_rank_raises_in_the_first_line_again_and_again(job: Job) -> None:
    assert set(job.start(3, "fault_programs:raising_at_once").wait().values()) == {0}
    assert returned_from(job, 3) == [0, 1, 2]
    assert all(iterations(job, rank) == [0, 1, 2, 3] for rank in range(3))


@lanes("gloo", "gloo by device", "gloo twice", "nccl-eager", "mixed")
def test_ranks_blocked_in_several_of_many_groups(job: Job) -> None:
    """With NCCL, where communicators are there: nothing frees a rank that waits for one."""
    job.start(3, "fault_programs:many_groups")
    assert set(job.wait().values()) == {0}
    assert all(iterations(job, rank) == [0, 1] for rank in range(3))
    assert causes(job) == {("exception", 2)}
    job.expect_no_orphans()


@lanes("gloo", "nccl", "nccl-eager")
def test_ranks_blocked_in_the_receipt_of_a_message(job: Job) -> None:
    """NCCL makes a communicator for each pair, which is in none of torch's tables."""
    assert set(job.start(3, "fault_programs:receiving").wait().values()) == {0}
    assert returned_from(job, 1) == [0, 1, 2]
    assert causes(job) == {("exception", 2)}
    job.expect_no_orphans()


@lanes_with("on", ["device", "stream", "item"], ["nccl", "nccl-eager", "mixed"])
def test_nothing_is_done_with_what_a_collective_has_not_delivered(job: Job, on: str) -> None:
    """The abort ends the wait for the device without an error."""
    times = 20
    job.start(2, "fault_programs:waiting_for_the_device", on=on, times=times)
    assert set(job.wait().values()) == {0}
    assert returned_from(job, times) == [0, 1]
    assert not list(job.directory.glob("after-*"))


@pytest.mark.skipif(
    not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list the keys of a store"
)
def test_groups_and_inner_calls_leave_nothing_in_the_store(job: Job) -> None:
    assert set(job.start(2, "fault_programs:leaving_keys_behind").wait().values()) == {0}
    assert returned_from(job, 4) == [0, 1]


def test_a_group_can_be_made_again_in_the_same_iteration(job: Job) -> None:
    """It must not find the addresses of the one that was destroyed."""
    assert set(job.start(2, "fault_programs:making_groups_again").wait().values()) == {0}
    assert returned_from(job, 1) == [0, 1]
