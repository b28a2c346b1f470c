"""The short form of ``scripts/soak_restart.py``."""

from __future__ import annotations

import pytest

from .conftest import Job
from .soak import expect_soaked, schedule


@pytest.mark.slow
def test_random_faults_do_not_change_the_result(job: Job) -> None:
    """Exceptions and hangs. With deaths among them, a rank is now and then lost that nothing
    struck; that is a known defect (docs/benchmarks.md), and the script is where to chase it.
    """
    seed = 1
    faults = schedule(seed, world=8, steps=40, faults=10, lethal=0)
    print("seed", seed, faults)
    expect_soaked(job.start(8, "soak", steps=40, faults=faults), 8, 40, faults)
