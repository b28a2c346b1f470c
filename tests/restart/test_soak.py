"""The short form of ``scripts/soak_restart.py``."""

from __future__ import annotations

import pytest

from .conftest import Job
from .soak import expect_soaked, schedule

STEPS = 40


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "lethal"), [(20, 0), (22, 4)], ids=["survivable", "deaths"])
def test_random_faults_do_not_change_the_result(job: Job, seed: int, lethal: int) -> None:
    """Eight ranks; exceptions, hangs and, in the second half, deaths of all kinds."""
    faults = schedule(seed, world=8, steps=STEPS, faults=12, lethal=lethal)
    print("seed", seed, faults)
    job.start(8, "soak_worker:soak", steps=STEPS, faults=faults, hard_s=12)
    expect_soaked(job, 8, STEPS)
