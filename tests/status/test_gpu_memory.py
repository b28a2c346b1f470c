"""Memory in use on each rank's GPU; NVML, which test machines lack, is played by a module."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ncclops.status.gpu_memory import GpuMemory


class Nvml:
    """Two GPUs, of which one is in use."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.used = {0: 2 << 30, 1: 60 << 30}

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index not in self.used:
            raise self.NVMLError("no such device")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:  # noqa: N802
        return {b"GPU-b": 1}[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=self.used[handle])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    settings: list[dict[str, str]] = [
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,GPU-b"},
        {"LOCAL_RANK": "7"},
        {"CUDA_VISIBLE_DEVICES": "0"},
    ]
    for rank, variables in enumerate(settings):
        (tmp_path / "ranks" / str(rank)).mkdir(parents=True)
        path = tmp_path / "ranks" / str(rank) / "environment.json"
        path.write_text(json.dumps({"variables": variables}))
    return tmp_path


def test_each_rank_has_the_memory_of_its_own_gpu(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    memory = GpuMemory(run)
    # The third asks for a GPU that is not there; of the fourth and fifth nobody knows which it is.
    assert [memory.gib(rank) for rank in range(5)] == [2.0, 60.0, None, None, None]


def test_without_nvml_nothing_is_known(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMemory(run).gib(0) is None
