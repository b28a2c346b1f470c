"""NVML as ncclops reads it: what a test sets of a GPU is what is read of it."""

from __future__ import annotations

import ctypes
import time
from dataclasses import asdict
from typing import Any

import pynvml
import pytest

from ncclops.host import gpu_readings
from ncclops.host.gpus import find_gpus
from ncclops.host.nvml import Device, GpuLostError, Nvml, Unavailable, session
from ncclops.restart import _devices
from ncclops.testing import JobFactory, note
from tests.fakegpu.host import Host

pytestmark = pytest.mark.slow

HEALTHY = {
    "device": 3,
    "name": "NVIDIA H200",
    "uuid": "GPU-66616b65-6770-7500-0000-000000000003",
    "utilization_percent": 0,
    "throttle_reasons": (),
    "sm_clock_mhz": 1980,
    "sm_clock_max_mhz": 1980,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
    "temperature_c": 38,
    "processes": 0,
    "recovery_action": 0,
    "remap_failed": False,
    "links_down": [],
    "links": 18,
}
# Of nvml.h: SW thermal slowdown and HW power brake.
THROTTLED = 0x20 | 0x80


# --- what ranks run ------------------------------------------------------------------------------


def gpus() -> tuple[str, ...]:
    return find_gpus().names


def health(gpu: int) -> dict[str, Any]:
    """All that ncclops reads of a GPU."""
    reading = _devices.read_gpu(gpu)
    links = _devices.read_links(gpu)
    return {
        **asdict(gpu_readings.read_gpu(gpu)),
        "recovery_action": reading.action,
        "remap_failed": reading.remap_failed,
        "links_down": [link for link, active in links.items() if not active],
        "links": len(links),
    }


def fabric(gpu: int) -> tuple[int, int, int]:
    """State, status and health of the GPU's fabric."""
    pynvml.nvmlInit()
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return info.state, info.status, info.healthMask


def reach(gpu: int) -> str:
    """What becomes of a use of the GPU."""
    with session() as nvml:
        if isinstance(nvml, Unavailable):
            return nvml.reason
        try:
            device = nvml.device(gpu)
            assert isinstance(device, Device)
            return str(device.query("nvmlDeviceGetTemperature", 0))
        except GpuLostError as error:
            return f"lost: {error}"


def watch_xids(count: int) -> list[tuple[int, int]]:
    """The next Xid errors of GPUs 1 and 2: which GPU, and which error."""
    with session() as nvml:
        assert isinstance(nvml, Nvml)
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in (1, 2)]
        events = pynvml.nvmlEventSetCreate()
        for handle in handles:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        note("watching")
        found = []
        for _ in range(count):
            event = pynvml.nvmlEventSetWait_v2(events, 60_000)
            found.append((pynvml.nvmlDeviceGetIndex(event.device), int(event.eventData)))
        try:
            pynvml.nvmlEventSetWait_v2(events, 10)
        except pynvml.NVMLError_Timeout:
            return found
        return [*found, (-1, -1)]


def seconds_for_temperature(gpu: int) -> float:
    start = time.monotonic()
    gpu_readings.read_gpu(gpu)
    return time.monotonic() - start


# --- tests ----------------------------------------------------------------------------------------


def read(ncclops_job: JobFactory, host: Host, program: Any, *arguments: Any) -> Any:
    job = ncclops_job(program, world_size=1, args=arguments, env=host.environment)
    return job.run().value


def test_gpus_are_found_by_name(ncclops_job: JobFactory, host: Host) -> None:
    assert read(ncclops_job, host, gpus) == ("NVIDIA H200",) * 8


def test_a_gpu_is_healthy_where_nothing_is_said(ncclops_job: JobFactory, host: Host) -> None:
    host.set("gpu 2 temperature_c=95")
    assert read(ncclops_job, host, health, 3) == HEALTHY


def test_what_is_set_is_read(ncclops_job: JobFactory, host: Host) -> None:
    host.set(
        "gpu * utilization_percent=97",
        "gpu 3 temperature_c=91 clock_mhz=345 pcie_width=8 pcie_generation=1",
        f"gpu 3 throttle_reasons={THROTTLED:#x} ecc_corrected=12 ecc_uncorrected=2",
        f"gpu 3 recovery_action=2 rows_failed=1 links={0x3FFFF & ~0b101:#x}",
    )
    found = read(ncclops_job, host, health, 3)
    reasons = found.pop("throttle_reasons")
    assert len(reasons) == 2
    assert found == {
        **{name: value for name, value in HEALTHY.items() if name != "throttle_reasons"},
        "utilization_percent": 97,
        "temperature_c": 91,
        "sm_clock_mhz": 345,
        "pcie_width": 8,
        "pcie_generation": 1,
        "ecc_corrected": 12,
        "ecc_uncorrected": 2,
        "recovery_action": 2,
        "remap_failed": True,
        "links_down": [0, 2],
    }


def test_the_fabric_has_a_state(ncclops_job: JobFactory, host: Host) -> None:
    host.set("gpu 3 fabric_state=2 fabric_status=999 fabric_health=1")
    assert read(ncclops_job, host, fabric, 3) == (2, 999, 1)
    assert read(ncclops_job, host, fabric, 4) == (3, 0, 0)


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("gpu 3 lost=1", "lost: "),
        ("nvmlDeviceGetTemperature error=NVML_ERROR_GPU_IS_LOST", "lost: "),
        ("nvmlDeviceGetTemperature nth=2 error=NVML_ERROR_GPU_IS_LOST", "38"),
        ("nvmlInit* error=NVML_ERROR_DRIVER_NOT_LOADED", "NVML is not available: Driver Not"),
    ],
)
def test_a_gpu_that_cannot_be_reached(
    ncclops_job: JobFactory, host: Host, line: str, outcome: str
) -> None:
    host.set(line)
    assert read(ncclops_job, host, reach, 3).startswith(outcome)


def test_each_xid_is_an_event_once(ncclops_job: JobFactory, host: Host) -> None:
    host.set("gpu 1 xid=13")  # before there is a watch
    env = host.environment
    with ncclops_job(watch_xids, world_size=1, args=(3,), env=env) as job:
        job.start().wait_for("watching")
        host.set("gpu 1 xid=13,31", "gpu 2 xid=48,79", "gpu 3 xid=63")
        assert job.wait().value == [(1, 31), (2, 48), (2, 79)]


def test_nvml_can_be_slow(ncclops_job: JobFactory, host: Host) -> None:
    host.set("nvmlDeviceGetName delay=0.2")
    assert read(ncclops_job, host, seconds_for_temperature, 3) >= 0.2  # a lower bound
