"""A wrapped function that calls another one: each rank meets the others in both."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.testing import Fault, JobFactory

from . import soak, soak_scenes
from .conftest import Job

pytestmark = pytest.mark.slow

STEPS = 12


@pytest.mark.parametrize(
    "fault",
    [
        Fault.exception(1, "initialize"),  # of the outer one: this rank does not come to the inner
        Fault.exception(1, "initialize", 2),  # of the inner one
        Fault.exception(1, "step", 3),
    ],
    ids=str,
)
def test_a_fault_outside_or_inside_restarts_all(
    ncclops_job: JobFactory, tmp_path: Path, fault: Fault
) -> None:
    job = ncclops_job(
        soak_scenes.train,
        world_size=2,
        args=("nested", tmp_path, STEPS, soak.timing(20)),
        faults=[fault],
        deadline=timedelta(seconds=100),
    )
    assert not soak.violations(job.run(), STEPS)


def test_an_inner_call_that_is_abandoned_leaves_no_thread(job: Job) -> None:
    assert job.start(2, "fault_programs:abandoning_an_inner_call").wait() == {0: 0, 1: 0}
    for event in job.events("threads"):
        assert event["names"].count("ncclops-monitor") == 1, event
    job.expect_no_orphans()
