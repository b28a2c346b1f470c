"""Iterations that end while a process group is made or destroyed leave nothing of it."""

from __future__ import annotations

import pytest

from .conftest import Job
from .test_faults import causes
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
