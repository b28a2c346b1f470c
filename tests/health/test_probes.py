"""The edges: a worker seen from the outside, and NVML with everything that it may lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ncclops.health import probes
from ncclops.host import gpu_readings
from ncclops.record import progress, shared_page
from tests.receipts.conftest import worker_environ

WORKER = """
import sys, time
from ncclops import receipt
from ncclops.receipts import recorder
for n in range(3):
    receipt.step(n)
recorder.current().note_collectives((8, 7))
with receipt.phase("checkpoint", limit="12m"):
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_worker_seen_from_the_outside(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=worker_environ(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        seen = probes.read_rank(tmp_path, 0, worker.pid, alive=True)
        assert seen.steps == 3
        assert seen.incarnation == (worker.pid, 0)
        assert seen.tick is not None
        assert not seen.warming_up
        assert seen.phase == "checkpoint"
        assert seen.phase_limit is not None
        assert seen.phase_age is not None
        assert seen.phase_age < seen.phase_limit
        assert (seen.enqueued, seen.completed) == (8, 7)
        assert seen.cpu_s is not None
        assert seen.cpu_s > 0
        assert seen.gpu_active is None
        stranger = probes.read_rank(tmp_path, 0, os.getpid())
        assert (stranger.steps, stranger.tick) == (None, None), "the page is of another process"
    finally:
        worker.kill()
        worker.communicate()
        shared_page.settle(progress.path_in(tmp_path, 0))
    assert probes.read_rank(tmp_path, 0, worker.pid).cpu_s is None


def test_a_script_that_only_prints_is_known_by_its_lines(tmp_path: Path) -> None:
    assert probes.read_rank(tmp_path, 0, os.getpid()).warming_up
    seen = probes.read_rank(tmp_path, 0, os.getpid(), printed_steps=40)
    assert seen.steps == 40
    assert not seen.warming_up


@pytest.mark.slow
def test_cpu_time_includes_children(tmp_path: Path) -> None:
    before = probes.tree_cpu_s(os.getpid())
    assert before is not None
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    after = probes.tree_cpu_s(os.getpid())
    assert after is not None
    assert after - before > 0.4


# ---- NVML --------------------------------------------------------------------------------------


class FakeNvmlError(Exception):
    pass


def fake_nvml(**answers: object) -> SimpleNamespace:
    """NVML at its outermost edge: what is not among ``answers`` is not supported."""

    def unsupported(*_: object) -> None:
        raise FakeNvmlError("Not Supported")

    questions = [
        *("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"),
        *("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetUtilizationRates"),
        *("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetTemperature"),
        *("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetTotalEccErrors"),
        *("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth"),
        *("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkGeneration"),
    ]
    answered = {name: (lambda *_, value=value: value) for name, value in answers.items()}
    return SimpleNamespace(
        **dict.fromkeys(questions, unsupported)
        | {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None}
        | answered,
        NVMLError=FakeNvmlError,
        NVML_CLOCK_SM=1,
        NVML_VOLATILE_ECC=0,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_TEMPERATURE_GPU=0,
    )


SICK = {
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetUUID": b"GPU-1234",
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40 | 0x01,
    "nvmlDeviceGetClockInfo": 1200,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetTotalEccErrors": 3,
}


def test_a_sick_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**SICK))
    health = gpu_readings.read_gpu(0)
    assert health.available
    assert (health.name, health.uuid) == ("NVIDIA H200", "GPU-1234")
    assert health.throttle_reasons == ("hardware thermal slowdown",)
    assert health.complaints() == [
        "slowed by hardware thermal slowdown",
        "PCIe x8 of x16",
        "SM clock 1200 of 1980 MHz",
        "3 uncorrected ECC errors",
    ]
    assert gpu_readings.is_active(0) is True


def test_what_a_driver_does_not_answer_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nvmlDeviceGetCurrentClocksEventReasons` is missing altogether, the rest says so."""
    answers = {"nvmlDeviceGetHandleByUUID": "handle", "nvmlDeviceGetUUID": "GPU-1234"}
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**answers))
    health = gpu_readings.read_gpu("GPU-1234")
    assert health.available
    assert health.throttle_reasons is None
    assert health.pcie_width is None
    assert health.complaints() == []


def test_an_idle_gpu_saves_power_and_is_not_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = SICK | {
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x01,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetTotalEccErrors": 0,
    }
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**idle))
    assert gpu_readings.read_gpu(0).complaints() == []
    assert gpu_readings.is_active(0) is False


def test_without_nvml_everything_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_readings.read_gpu(0) == gpu_readings.GpuHealth(device=0)
    assert gpu_readings.is_active(0) is None


def test_the_gpu_of_a_rank_follows_cuda_visible_devices() -> None:
    assert gpu_readings.visible_device(3, {}) == 3
    assert gpu_readings.visible_device(1, {"CUDA_VISIBLE_DEVICES": "4, 6"}) == 6
    assert gpu_readings.visible_device(0, {"CUDA_VISIBLE_DEVICES": "GPU-1234"}) == "GPU-1234"
    assert gpu_readings.visible_device(2, {"CUDA_VISIBLE_DEVICES": "4,6"}) is None
    assert gpu_readings.visible_device(0, {"CUDA_VISIBLE_DEVICES": ""}) is None


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pytest.skip("no GPU on this machine")
    health = gpu_readings.read_gpu(0)
    assert health.available
    assert health.throttle_reasons is not None
    assert health.sm_clock_max_mhz
