"""What readers make of single places of a tree: waiting programs, modules, device files, slots."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ncclops.host.nvml import Device, Nvml
from ncclops.preflight.machine import gpu_reader, host_reader, nic_reader, stuck_reader
from ncclops.preflight.machine.gpu_reader import missing_file
from ncclops.preflight.readings import Process, Stuck

WAITING = Process(7, "python3", "D")
KERNEL, PROGRAM = 0x200040, 0x400040


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def thread(
    state: str, switches: int, flags: int = PROGRAM, place: str = "proc/7"
) -> dict[str, str]:
    return {
        f"{place}/stat": f"7 (python3) {state} 1 7 7 0 -1 {flags} 0 0",
        f"{place}/status": f"voluntary_ctxt_switches:\t{switches}\n"
        "nonvoluntary_ctxt_switches:\t3\n",
        f"{place}/wchan": "rpc_wait_bit_killable",
        "proc/uptime": f"{switches}.0 9",
    }


@pytest.fixture
def meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """What the tree shows once the reader has waited."""
    later: dict[str, str] = {}
    monkeypatch.setattr(time, "sleep", lambda _: write(tmp_path, later))
    return later.update


def test_a_program_that_has_not_run_between_two_looks_stands_still(
    tmp_path: Path, meanwhile: Callable[[dict[str, str]], None]
) -> None:
    write(tmp_path, thread("D", 20))
    (tmp_path / "proc/7/fd").mkdir()
    (tmp_path / "proc/7/fd/4").symlink_to("/dev/nvidia3")
    (tmp_path / "proc/7/fd/5").symlink_to("/dev/nvidiactl")
    wanted = Stuck(pid=7, name="python3", gpus=("/dev/nvidia3",), place="rpc_wait_bit_killable")
    # A copy, in which the clock stands as well, says nothing.
    assert stuck_reader.read_stuck(tmp_path, [WAITING]) == (wanted,)
    meanwhile({"proc/uptime": "21.0 9"})
    (found,) = stuck_reader.read_stuck(tmp_path, [WAITING])
    assert found.moved is False
    write(tmp_path, {"proc/uptime": "20.0 9"})
    meanwhile(thread("D", 21))
    (found,) = stuck_reader.read_stuck(tmp_path, [WAITING])
    assert found.moved is True
    meanwhile(thread("S", 22))
    assert stuck_reader.read_stuck(tmp_path, [WAITING]) == ()


def test_of_a_program_that_was_killed_another_thread_may_wait(
    tmp_path: Path, meanwhile: Callable[[dict[str, str]], None]
) -> None:
    write(tmp_path, thread("Z", 20, place="proc/7/task/7"))
    write(tmp_path, thread("D", 20, place="proc/7/task/9"))
    meanwhile({"proc/uptime": "21.0 9"})
    (found,) = stuck_reader.read_stuck(tmp_path, [Process(7, "python3", "Z")])
    assert found.moved is False


def test_threads_of_the_kernel_may_wait_so(
    tmp_path: Path, meanwhile: Callable[[dict[str, str]], None]
) -> None:
    write(tmp_path, thread("D", 20, KERNEL))
    assert stuck_reader.read_stuck(tmp_path, [WAITING, Process(8, "bash", "S")]) == ()


def module(size: int, *, type_: int = 0x22, large: int = 0, technology: int = 3) -> bytes:
    """A Memory Device of SMBIOS; sizes in MiB."""
    entry = bytearray(0x5C)
    entry[:2], entry[0x0C:0x0E] = bytes([17, 0x5C]), size.to_bytes(2, "little")
    entry[0x12], entry[0x28] = type_, technology
    entry[0x1C:0x20] = large.to_bytes(4, "little")
    return bytes(entry) + b"DIMM_A1\0\0"


def modules(root: Path, *entries: bytes) -> tuple[int, ...] | None:
    for number, entry in enumerate(entries):
        place = root / f"sys/firmware/dmi/entries/17-{number}/raw"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(entry)
    return host_reader.read_host(root).modules


def test_memory_modules_are_read_from_the_firmware_s_list(tmp_path: Path) -> None:
    listed = [module(0x4000), module(0x7FFF, large=65536), module(0), module(0x8000 | 2048)]
    persistent = [module(0x4000, type_=0x1F), module(0x4000, technology=7)]
    assert modules(tmp_path, *listed, *persistent) == (16384, 65536, 0, 2)


@pytest.mark.parametrize("entries", [[], [b""], [module(0x4000), module(0xFFFF)]])
def test_a_list_that_says_too_little_is_none(entries: list[bytes], tmp_path: Path) -> None:
    assert modules(tmp_path, *entries) is None


def test_the_device_file_of_a_gpu_is_looked_for_by_its_number(tmp_path: Path) -> None:
    pci = "0000:19:00.0"
    assert missing_file(tmp_path, pci) is None
    assert missing_file(tmp_path, None) is None
    listed = f"proc/driver/nvidia/gpus/{pci}/information"
    write(tmp_path, {listed: "Model: \t\t NVIDIA H200\nDevice Minor: \t 3\n"})
    assert missing_file(tmp_path, pci) == "dev/nvidia3"
    write(tmp_path, {"dev/nvidia3": ""})
    assert missing_file(tmp_path, pci) is None


def test_what_a_slot_can_do_is_read_of_the_bridge_above(tmp_path: Path) -> None:
    bridge = "sys/devices/pci0000:15/0000:15:01.0"
    write(
        tmp_path, {f"{bridge}/max_link_width": "8", f"{bridge}/0000:18:00.0/max_link_width": "16"}
    )
    top = tmp_path / "sys/class/infiniband/mlx5_0"
    top.mkdir(parents=True)
    (top / "device").symlink_to(f"../../../../{bridge}/0000:18:00.0")
    found = nic_reader.read_device(tmp_path, "mlx5_0")
    device = "sys/class/infiniband/mlx5_0/device"
    assert found.number(f"{device}/../max_link_width") == 8
    assert found.number(f"{device}/max_link_width") == 16


def test_what_a_driver_says_of_sram_and_of_pages_that_are_to_be_retired() -> None:
    """Answers of NVML, which no driver here gives; older ones do not know the questions."""

    def answer(_: Any, status: Any) -> int:
        status._obj.bThresholdExceeded = 1
        return pynvml.NVML_SUCCESS

    old = Device(Nvml(SimpleNamespace(NVMLError=pynvml.NVMLError)), None, 0)
    assert gpu_reader.sram_exceeded(old) is None
    assert gpu_reader.pages_pending(old) is None
    bindings = SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        c_nvmlEccSramErrorStatus_v1_t=pynvml.c_nvmlEccSramErrorStatus_v1_t,
        nvmlDeviceGetSramEccErrorStatus=answer,
        nvmlDeviceGetRetiredPagesPendingStatus=lambda _: 1,
    )
    new = Device(Nvml(bindings), None, 0)
    assert gpu_reader.sram_exceeded(new) is True
    assert gpu_reader.pages_pending(new) is True


def test_what_an_efa_counts_of_its_commands_is_read_of_the_device(tmp_path: Path) -> None:
    top = "sys/class/infiniband/rdmap79s0"
    write(tmp_path, {f"{top}/hw_counters/no_completion_cmds": "0\n", f"{top}/node_guid": "1"})
    found = nic_reader.read_counters(tmp_path, "rdmap79s0")
    assert found.texts == {f"{top}/hw_counters/no_completion_cmds": "0"}
