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
from tests.restart.conftest import profile_environment

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
JOBS = [(name, 4) for name in FOUR] + [(name, 8) for name in EIGHT]


# Gloo alone has a monitored barrier. Collectives of two groups run beside each other on the fake
# GPU, in whatever order they were called.
ON_NCCL = [(n, 4) for n in FOUR if n not in ("monitored", "two_groups", "circle_of_pairs")]


def run_jobs(
    folder: Path,
    jobs: Iterable[tuple[str, int]],
    backend: str,
    environment: Mapping[str, str],
    python: str | Path = sys.executable,
) -> None:
    """Leave ``<scenario>-<world>/`` of each job in ``folder``."""
    requests = []
    for scenario, world in jobs:
        out = folder / f"{scenario}-{world}"
        out.mkdir()
        request = {"name": out.name, "scenario": scenario, "world": world, "out": str(out)}
        requests.append(json.dumps(request | {"silent": scenario == "holding_the_gil"}) + "\n")
    zygote = subprocess.run(
        [python, Path(__file__).parent / "zygote.py", backend],
        input="".join(requests),
        env=clean_environ(environment),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert zygote.returncode == 0, zygote.stderr


@pytest.fixture(scope="session")
def hangs(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``<scenario>-<world>/`` of each job: a run's incident, pickles and JSON."""
    folder = tmp_path_factory.mktemp("hangs")
    run_jobs(folder, JOBS, "gloo", RECORDER)
    return folder


@pytest.fixture(scope="session")
def nccl_hangs(fake_gpu_place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the jobs on NCCL."""
    folder = tmp_path_factory.mktemp("nccl-hangs")
    with fake_host(fake_gpu_place, folder) as host:
        environment = host.environment | profile_environment(folder)
        run_jobs(folder, ON_NCCL, "nccl", environment, fake_gpu_place.python)
    return folder
