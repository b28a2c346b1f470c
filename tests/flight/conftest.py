"""Jobs that hang, made once for all tests of this directory: real ranks over Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import clean_environ

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


@pytest.fixture(scope="session")
def hangs(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with ``<scenario>-<world>/`` of each job: a run's incident, pickles and JSON."""
    folder = tmp_path_factory.mktemp("hangs")
    requests = []
    for scenario, world in JOBS:
        out = folder / f"{scenario}-{world}"
        out.mkdir()
        request = {"name": out.name, "scenario": scenario, "world": world, "out": str(out)}
        requests.append(json.dumps(request | {"silent": scenario == "holding_the_gil"}) + "\n")
    zygote = subprocess.run(
        [sys.executable, Path(__file__).parent / "zygote.py"],
        input="".join(requests),
        env=clean_environ(RECORDER),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert zygote.returncode == 0, zygote.stderr
    yield folder
