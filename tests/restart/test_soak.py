"""The short form of ``scripts/soak_restart.py``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.testing import JobFactory

from . import soak, soak_scenes

pytestmark = pytest.mark.slow

STEPS = 24
DEADLINE = timedelta(seconds=170)


@pytest.mark.parametrize(
    "scene",
    [
        scene
        if scene in ("ddp", "persistent-loader", "writer")
        else pytest.param(scene, marks=pytest.mark.extended)
        for scene in soak_scenes.SCENES
    ],
)
def test_random_faults_do_not_change_the_result(
    ncclops_job: JobFactory, tmp_path: Path, scene: str
) -> None:
    """Four ranks; one of the faults is lethal, but for what two wrappers would both act upon."""
    faults = soak.schedule(20, 4, STEPS, 4, lethal=0 if scene == "nested" else 1)
    arguments = (scene, tmp_path, STEPS, soak.timing(12))
    job = ncclops_job(
        soak_scenes.train,
        world_size=4,
        args=arguments,
        faults=faults,
        deadline=DEADLINE,
        all_strike=False,
    )
    result = job.run()
    assert not soak.violations(result, STEPS), result.strikes
    assert result.strikes
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    assert not soak.segments_of(job.pids.values(), shared)


def test_forty_restarts_leave_nothing_behind(ncclops_job: JobFactory) -> None:
    arguments = (40, soak.timing(30))
    job = ncclops_job(soak_scenes.restart_often, world_size=2, args=arguments, deadline=DEADLINE)
    result = job.run()
    soak.expect_forty_restarts_without_growth(result)
