"""A main thread that waits for a send which Gloo never wakes anyone from."""

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
