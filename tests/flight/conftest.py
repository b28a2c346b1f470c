"""Jobs that hang, made once for all tests of this directory: real ranks over Gloo and NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.conftest import clean_environ
from tests.fakegpu.host import fake_host
from tests.fakegpu.place import Place
from tests.lanes import profile_environment

LIMIT_S = 150
# As profiles have it; torch 2.7 to 2.10 record nothing by default.
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
FOUR = (
    "sleeping", "two_sleeping", "other_shape", "larger_shape", "gather_shape", "other_dtype",
    "larger_dtype", "other_op", "other_order", "two_groups", "circle_of_pairs", "killed_inside",
    "holding_the_gil", "data_loader", "data_loader_workers", "missing_barrier", "monitored",
    "one_step_more", "one_step_less", "raised_and_cleans_up", "subgroup_shape", "chain",
    "receives_nothing", "asynchronous", "merely_late", "healthy",
)  # fmt: skip
EIGHT = (
    "sleeping", "larger_shape", "larger_dtype", "other_op", "other_order", "two_groups",
    "killed_inside", "holding_the_gil", "data_loader",
)  # fmt: skip
# With eight ranks, the gate has one rank that does not come and one circle of groups.
EXTENDED = [("gloo", name, 8) for name in EIGHT if name not in ("sleeping", "two_groups")]
BACKENDS = {"gloo": "gloo", "nccl": "nccl", "mixed": "cpu:gloo,cuda:nccl"}
JOBS = {
    "gloo": [(name, 4) for name in FOUR] + [(name, 8) for name in EIGHT],
    # Gloo alone has a monitored barrier. Once communicators exist, it is the device that waits.
    "nccl": [(name, 4) for name in FOUR if name != "monitored"]
    + [(name, 4) for name in ("two_groups_again", "circle_of_pairs_again")],
    # Groups over CPUs and GPUs, and so with two recorders.
    "mixed": [(name, 4) for name in ("sleeping", "sleeping_on_cpu", "other_device", "healthy")],
}


def run_jobs(
    folder: Path,
    jobs: Iterable[tuple[str, str, int]],
    environment: Mapping[str, str],
    python: str | Path = sys.executable,
) -> None:
    """Leave ``<lane>/<scenario>-<world>/`` of each job in ``folder``."""
    requests = []
    for lane, scenario, world in jobs:
        out = folder / lane / f"{scenario}-{world}"
        out.mkdir(parents=True)
        request = {"scenario": scenario, "world": world, "out": str(out), "backend": BACKENDS[lane]}
        requests.append(json.dumps(request | {"silent": scenario == "holding_the_gil"}) + "\n")
    zygote = subprocess.run(
        [python, Path(__file__).parent / "zygote.py"],
        input="".join(requests),
        env=clean_environ(environment),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert zygote.returncode == 0, zygote.stderr


@pytest.fixture(scope="session")
def hangs(
    starts_processes: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """A directory with ``<scenario>-<world>/`` of each job: a run's incident, pickles and JSON."""
    folder = tmp_path_factory.mktemp("hangs")
    jobs = [("gloo", *job) for job in JOBS["gloo"]]
    left_out = [] if request.config.getoption("--extended") else EXTENDED
    run_jobs(folder, [job for job in jobs if job not in left_out], RECORDER)
    return folder / "gloo"


@pytest.fixture(scope="session")
def gpu_hangs(fake_gpu_place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the jobs with GPUs, each lane in a directory."""
    folder = tmp_path_factory.mktemp("gpu-hangs")
    with fake_host(fake_gpu_place, folder) as host:
        jobs = [(lane, *job) for lane in ("nccl", "mixed") for job in JOBS[lane]]
        environment = host.environment | profile_environment(folder)
        run_jobs(folder, jobs, environment, fake_gpu_place.python)
    return folder
