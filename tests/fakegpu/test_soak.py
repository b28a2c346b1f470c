"""The short form of ``scripts/soak_restart.py --backend nccl``."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ncclops.testing import JobFactory
from tests.fakegpu.host import Host
from tests.restart import soak, soak_scenes

pytestmark = pytest.mark.slow

DEADLINE = timedelta(seconds=170)


def test_forty_restarts_leave_nothing_behind(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(
        soak_scenes.restart_often,
        world_size=2,
        args=(40, soak.timing(30), "nccl"),
        env=host.environment,
        deadline=DEADLINE,
    )
    result = job.run()
    soak.expect_forty_restarts_without_growth(result)
