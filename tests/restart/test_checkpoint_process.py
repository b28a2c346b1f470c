"""The process in which torch writes checkpoints does not outlive the iteration that made it."""

from __future__ import annotations

import pytest

from .conftest import Job


@pytest.mark.slow
def test_a_save_that_some_ranks_had_begun_does_not_meet_the_next_one(job: Job) -> None:
    """The process of one rank would wait in it for that of another, which has got a later save."""
    pytest.importorskip("torch.distributed.checkpoint._async_process_executor")
    assert set(job.start(2, "checkpoint_programs:saving").wait().values()) == {0}
    assert [e["value"] for e in job.events("loaded")] == [[3.0] * 4] * 2
    assert [e["count"] for e in job.events("children")] == [0] * 4
    job.expect_no_orphans()
