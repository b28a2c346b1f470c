"""Iterations that end while a process group is made or destroyed leave nothing of it."""

from __future__ import annotations

import pytest

from tests.fakegpu.host import Host

from .conftest import Job, lanes, lanes_with
from .test_faults import causes, returned_from
from .test_faults_interruption import iterations


@pytest.mark.parametrize(
    "at",
    [
        "_new_process_group_helper",
        "_set_group_name",
        "_register_pg_in_world",
        "_update_default_pg",
        "new_group",
        "destroy_process_group",
        "shutdown",
        "_unregister_process_group",
        "_unregister_all_process_groups",
    ],
)
def test_a_group_that_is_half_made_or_half_destroyed_does_not_spoil_the_process(
    job: Job, at: str
) -> None:
    assert set(job.start(2, "group_programs:cut", at=at).wait().values()) == {0}
    assert iterations(job, 0) == iterations(job, 1) == [0, 1]
    assert causes(job) == {("requested", 0)}


def test_a_group_that_connects_while_it_is_made_is_aborted(job: Job) -> None:
    """It is in none of torch's tables then."""
    assert set(job.start(2, "group_programs:connecting_eagerly").wait().values()) == {0}
    assert iterations(job, 0) == iterations(job, 1) == [0, 1]
    assert causes(job) == {("exception", 1)}


@lanes_with("slow", ["ncclCommFinalize", "ncclCommDestroy"], ["nccl", "nccl-eager", "mixed"])
def test_groups_that_are_just_ending_are_ended_once(job: Job, host: Host, slow: str) -> None:
    """torch ends them in the main thread, slowly, while they are aborted."""
    host.set(f"{slow} delay=1", "ncclCommAbort delay=1")
    assert job.start(3, "fault_programs:ending_groups").wait() == {0: 0, 1: 0, 2: 0}
    assert returned_from(job, 1) == [0, 1, 2]


@lanes("nccl")
def test_hooks_of_the_flight_recorder_live_until_the_main_thread_is_out(job: Job) -> None:
    """In torch 2.15 a collective crashes where one is dropped in another thread meanwhile."""
    assert job.start(2, "fault_programs:recorder_hooks").wait() == {0: 0, 1: 0}
    assert [event["held"] for event in job.events("hooks", 0)] == [[True], [False]]
