"""The command on fake GPUs: what NVML says of them, and an NVML that does not answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ncclops.preflight.checks.ports import selects
from tests.conftest import run_ncclops
from tests.fakegpu.host import Host
from tests.preflight.machines import KINDS, make

pytestmark = pytest.mark.slow


def findings(host: Host, tmp_path: Path, *more: str) -> list[dict[str, Any]]:
    """What the command says of ``host`` below a made root, beside what is well."""
    root = tmp_path / "root"
    if not root.exists():
        machine = make(KINDS.index("hgx-ib"))
        for path in [path for path in machine.files if "nvidia" in path or "/pci/" in path]:
            del machine.files[path]
        machine.write(root)
    done = run_ncclops(
        tmp_path,
        "preflight",
        f"--root={root}",
        "--json",
        "--window=50ms",
        *more,
        env=host.environment,
        python=sys.executable,
    )
    assert done.returncode in (0, 3), done.stderr
    (node,) = json.loads(done.stdout)["hosts"]
    found: list[dict[str, Any]] = node["findings"]
    return [each for each in found if each["status"] in ("WARN", "FAIL")]


SICK = {
    "gpu.ecc": "ecc_uncorrected=2",
    "gpu.rows": "rows_pending=1",
    "gpu.recovery": "recovery_action=1",
    "gpu.throttle": "throttle_reasons=64",
    "gpu.temperature": "temperature_c=94",
    "gpu.nvlink": "links=0x1ffff",
    "gpu.fabric": "fabric_state=1",
    "gpu.pcie": "pcie_width=8",
}


def test_each_state_of_a_gpu_is_found_by_its_check(host: Host, tmp_path: Path) -> None:
    assert findings(host, tmp_path) == []
    host.set(*(f"gpu {number} {state}" for number, state in enumerate(SICK.values())))
    found = findings(host, tmp_path)
    wanted = {(check, f"GPU {number}") for number, check in enumerate(SICK)}
    assert {(each["check"], each["subject"]) for each in found} == wanted
    host.set("gpu 5 lost=1")
    found = findings(host, tmp_path)
    assert [(each["check"], each["subject"]) for each in found] == [("gpu.lost", "GPU 5")]


def test_gpus_that_do_not_answer_are_named_and_the_others_judged(
    host: Host, tmp_path: Path
) -> None:
    host.set("nvmlDeviceGetTemperature hang=forever")
    found = findings(host, tmp_path, "--limit=10s")
    assert {(each["check"], each["subject"]) for each in found} == {
        ("host.readable", f"GPU {number}") for number in range(8)
    }
    host.set("nvmlInitWithFlags hang=forever")
    found = findings(host, tmp_path, "--limit=10s")
    assert [(each["check"], each["subject"]) for each in found] == [("host.readable", "NVML")]


@pytest.mark.extended
def test_what_the_driver_refuses_to_say_convicts_nobody(host: Host, tmp_path: Path) -> None:
    host.set(
        *(
            f"{name} error=NVML_ERROR_NOT_SUPPORTED"
            for name in ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetNvLinkState",
                         "nvmlDeviceGetTemperature", "nvmlDeviceGetTotalEccErrors",
                         "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetMaxPcieLinkWidth",
                         "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetFieldValues",
                         "nvmlDeviceGetPciInfo_v3")
        )
    )  # fmt: skip
    assert findings(host, tmp_path) == []


def test_the_selector_is_read_as_nccl_reads_it() -> None:
    for setting, device, port, wanted in (
        ("", "mlx5_0", "1", True),
        ("mlx5", "mlx5_7", "1", True),
        ("mlx5_1", "mlx5_10", "1", True),
        ("=mlx5_1", "mlx5_10", "1", False),
        ("=mlx5_1:2", "mlx5_1", "1", False),
        ("=mlx5_1:2", "mlx5_1", "2", True),
        ("^mlx5_1", "mlx5_1", "1", False),
        ("^mlx5_1", "mlx5_2", "1", True),
        ("^=mlx5_1,mlx5_2", "mlx5_10", "1", True),
        ("mlx5_0,mlx5_3:1", "mlx5_3", "1", True),
    ):
        assert selects(setting, device, port) is wanted, setting
