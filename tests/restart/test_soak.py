"""The short form of ``scripts/soak_restart.py``."""

from __future__ import annotations

import pytest

from .conftest import Job
from .soak import expect_soaked, schedule


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_random_faults_do_not_change_the_result(job: Job, seed: int) -> None:
    faults = schedule(seed, world=8, steps=40, faults=10, lethal=3)
    print("seed", seed, faults)
    expect_soaked(job.start(8, "soak", steps=40, faults=faults), 8, 40, faults)
