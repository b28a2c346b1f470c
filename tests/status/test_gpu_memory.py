"""Memory in use on each rank's GPU; NVML, which test machines lack, is played by a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclops.record.environment_record import ENVIRONMENT, EnvSnapshot

pytestmark = pytest.mark.slow

_READ = """
import json, sys
from pathlib import Path
from ncclops.status.gpu_memory import GpuMemory
memory = GpuMemory(Path(sys.argv[1]))
print(json.dumps([memory.gib(rank) for rank in range(5)]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    settings: list[dict[str, str]] = [
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,GPU-stub-3"},
        {"LOCAL_RANK": "7"},
        {"CUDA_VISIBLE_DEVICES": "0"},
    ]
    for rank, variables in enumerate(settings):
        (tmp_path / "ranks" / str(rank)).mkdir(parents=True)
        path = tmp_path / "ranks" / str(rank) / "environment.json"
        path.write_bytes(ENVIRONMENT.encode(EnvSnapshot("environment", variables)))
    return tmp_path


def test_each_rank_has_the_memory_of_its_own_gpu(with_nvml: Callable[..., Any], run: Path) -> None:
    # The third asks for a GPU that is not there; which GPU the last two have is not known.
    seen = with_nvml(_READ, run, NVML_STUB_USED_GIB="2")
    assert seen == [2.0, 5.0, None, None, None]


def test_without_nvml_nothing_is_known(with_nvml: Callable[..., Any], run: Path) -> None:
    assert with_nvml(_READ, run, NVML_STUB_USED_GIB="2", NVML_STUB_INIT="9") == [None] * 5
