"""GPUs are counted once and the same for all: NVML first, the driver's files without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclops.host.gpus import Gpus, find_gpus
from tests.conftest import CompletedText

pytestmark = pytest.mark.slow

Counted = Callable[..., Gpus]

_PROGRAM = """
import dataclasses, json, sys
from pathlib import Path
from ncclops.host.gpus import find_gpus
print(json.dumps(dataclasses.asdict(find_gpus(root=Path(sys.argv[1])))))
"""


@pytest.fixture
def counted(with_nvml: Callable[..., Any]) -> Callable[..., Gpus]:
    """``find_gpus`` in a process that has the stand-in for NVML and a root of its own."""

    def count(root: Path, **variables: str) -> Gpus:
        fields = with_nvml(_PROGRAM, root, **variables)
        return Gpus(**fields | {"names": tuple(fields["names"])})

    return count


@pytest.fixture
def three_files(tmp_path: Path) -> Path:
    for index in range(3):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{index:02x}:00.0").mkdir(parents=True)
    return tmp_path


def test_nvml_is_believed_whatever_the_drivers_files_say(
    counted: Counted, three_files: Path
) -> None:
    gpus = counted(three_files, NVML_STUB_COUNT="8")
    assert gpus == Gpus(("NVIDIA Stub",) * 8, "570.86")
    assert counted(three_files, NVML_STUB_COUNT="0").count == 0


def test_a_lost_gpu_still_counts(counted: Counted, tmp_path: Path) -> None:
    assert counted(tmp_path, NVML_STUB_COUNT="2", NVML_STUB_LOST="15").count == 2


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("2,0", 2), ("1,9,0", 1), ("GPU-stub-3", 1)]
)
def test_what_cuda_hides_is_not_counted(
    counted: Counted, three_files: Path, visible: str, count: int
) -> None:
    assert counted(three_files, CUDA_VISIBLE_DEVICES=visible).count == count
    without = counted(three_files, CUDA_VISIBLE_DEVICES=visible, NVML_STUB_INIT="9")
    assert without.count == count


def test_without_nvml_the_drivers_files_are_counted_and_a_remark_says_so(
    counted: Counted, three_files: Path
) -> None:
    gpus = counted(three_files, NVML_STUB_INIT="9")
    assert (gpus.count, gpus.driver) == (3, None)
    assert (gpus.remark or "").startswith(
        "3 GPUs counted by the driver's files, since NVML is not available"
    )


def test_devices_count_where_a_container_hides_proc(counted: Counted, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert counted(tmp_path, NVML_STUB_INIT="9").count == 2


def test_a_machine_without_nvml_and_files_has_none(counted: Counted, tmp_path: Path) -> None:
    assert counted(tmp_path, NVML_STUB_INIT="9") == Gpus()


def test_launch_chooses_lane_and_workers_by_what_nvml_shows(
    ncclops: Callable[..., CompletedText], nvml_stub: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    asked = ("launch", "--dry-run", "--json", script)
    nvml = {"LD_LIBRARY_PATH": str(nvml_stub), "NVML_STUB_COUNT": "8"}
    done = ncclops(*asked, env=nvml)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["profile"]["name"] == "single-node-h200"
    assert plan["nproc_per_node"] == 8
    assert plan["stack"]["gpu"] == "8 × NVIDIA Stub"
    hidden = json.loads(ncclops(*asked, env=nvml | {"CUDA_VISIBLE_DEVICES": ""}).stdout)
    assert (hidden["profile"]["name"], hidden["nproc_per_node"]) == ("local-cpu", 1)


def test_gpus_are_looked_up_once_in_a_process(tmp_path: Path) -> None:
    assert find_gpus({}, tmp_path) is find_gpus({}, tmp_path)
