"""Main threads that wait in Gloo for what does not come."""

from __future__ import annotations

import signal
import time

import pytest

from .conftest import Job
from .test_faults import causes, returned_from


@pytest.mark.slow
@pytest.mark.parametrize("how", ["send", "broadcast"])
def test_a_rank_that_gloo_does_not_free_is_ended_and_no_cause(job: Job, how: str) -> None:
    """It waits itself for a send, and for a collective in a thread of the group's."""
    job.start(3, "gloo_programs:sending_to_the_dead", how=how)
    job.wait_for("sends")
    time.sleep(0.5)  # nothing announces that rank 0 waits in Gloo
    job.kill(1)
    assert job.wait() == {0: -signal.SIGTERM, 1: -signal.SIGKILL, 2: 0}
    assert returned_from(job, 1) == [2]
    assert causes(job) == {("died", 1)}
    assert "it still waits in Gloo, which no abort ends" in job.monitor_log(0)


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_has_returned_are_not_left_to_that(job: Job) -> None:
    """Its groups are open, as its process lives: nothing else would end the wait."""
    job.start(3, "gloo_programs:returning_early")
    assert job.wait() == {0: 0, 1: 0, 2: 0}
    assert returned_from(job, 1) == [0, 1, 2]
    assert causes(job) == {("returned-early", 1)}


@pytest.mark.slow
@pytest.mark.parametrize("done", [False, True])
def test_a_rank_that_takes_longer_than_the_others_is_waited_for(job: Job, *, done: bool) -> None:
    """Where nothing else was said, the groups can be used after the function."""
    job.start(3, "gloo_programs:one_rank_takes_longer", done=done)
    assert job.wait() == {0: 0, 1: 0, 2: 0}
    assert [event["iteration"] for event in job.events("done")] == [0, 0, 0]
