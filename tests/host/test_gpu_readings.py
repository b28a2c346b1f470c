"""What NVML says of a GPU; the library is played by a stand-in, in a separate process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ncclops.host import gpu_readings, nvml

pytestmark = pytest.mark.slow

WithNvml = Callable[..., Any]

_READ = """
import json, sys
from ncclops.host import gpu_readings
device = int(sys.argv[1]) if sys.argv[1].isdecimal() else sys.argv[1]
health = gpu_readings.read_gpu(device)
print(json.dumps({
    "health": health.to_json(),
    "available": health.available,
    "complaints": health.complaints(),
    "active": gpu_readings.is_active(device),
}))
"""
SICK = {
    "NVML_STUB_BUSY": "97",
    "NVML_STUB_REASONS": str(0x40 | 0x01),
    "NVML_STUB_CLOCK": "1200",
    "NVML_STUB_CLOCK_MAX": "1980",
    "NVML_STUB_PCIE": "8",
    "NVML_STUB_PCIE_MAX": "16",
    "NVML_STUB_ECC": "3",
}


def test_a_sick_gpu_is_described(with_nvml: WithNvml) -> None:
    seen = with_nvml(_READ, "0", **SICK)
    assert seen["available"]
    assert (seen["health"]["name"], seen["health"]["uuid"]) == ("NVIDIA Stub", "GPU-stub-0")
    assert seen["health"]["throttle_reasons"] == ["hardware thermal slowdown"]
    assert seen["complaints"] == [
        "slowed by hardware thermal slowdown",
        "PCIe x8 of x16",
        "SM clock 1200 of 1980 MHz",
        "3 uncorrected ECC errors",
    ]
    assert seen["active"] is True


def test_what_a_driver_does_not_answer_is_not_available(with_nvml: WithNvml) -> None:
    seen = with_nvml(_READ, "GPU-stub-2")
    assert seen["health"]["uuid"] == "GPU-stub-2"
    assert seen["health"]["throttle_reasons"] is None
    assert seen["health"]["pcie_width"] is None
    assert (seen["complaints"], seen["active"]) == ([], None)


def test_an_idle_gpu_saves_power_and_is_not_sick(with_nvml: WithNvml) -> None:
    idle = {"NVML_STUB_BUSY": "0", "NVML_STUB_REASONS": "1", "NVML_STUB_ECC": "0"}
    seen = with_nvml(_READ, "0", **SICK | idle | {"NVML_STUB_PCIE": "16"})
    assert (seen["complaints"], seen["active"]) == ([], False)


@pytest.mark.parametrize(
    "variables", [{"NVML_STUB_INIT": "9"}, {"NVML_STUB_LOST": "15"}, {"NVML_STUB_COUNT": "0"}]
)
def test_without_nvml_or_the_gpu_everything_is_not_available(
    with_nvml: WithNvml, variables: dict[str, str]
) -> None:
    seen = with_nvml(_READ, "0", **SICK | variables)
    assert not seen["available"]
    assert seen["health"] == gpu_readings.GpuHealth(device=0).to_json()
    assert seen["active"] is None


_STATES = """
import json
from ncclops.host import nvml
found = []
with nvml.session() as session:
    if isinstance(session, nvml.Unavailable):
        found.append(session.reason)
    else:
        found.append(session.query("nvmlSystemGetDriverVersion"))
        found.append(session.query("nvmlNoSuchQuery"))
        for selector in (1, 99, "GPU-other"):
            try:
                device = session.device(selector)
            except nvml.GpuLostError as error:
                found.append(f"lost: {error}")
            else:
                missing = isinstance(device, nvml.Unavailable)
                found.append(device.reason if missing else device.query("nvmlDeviceGetUUID"))
print(json.dumps(found))
"""


def test_no_such_gpu_and_no_such_question_are_values(with_nvml: WithNvml) -> None:
    driver, question, one, other, named = with_nvml(_STATES)
    assert (driver, question, one) == ("570.86", None, "GPU-stub-1")
    assert other.startswith("NVML does not know GPU 99")
    assert named.startswith("NVML does not know GPU GPU-other")


def test_a_lost_gpu_is_an_error_and_no_nvml_is_a_value(with_nvml: WithNvml) -> None:
    assert with_nvml(_STATES, NVML_STUB_LOST="15")[2].startswith("lost: the GPU does not answer")
    (reason,) = with_nvml(_STATES, NVML_STUB_INIT="9")
    assert reason.startswith("NVML is not available")


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    with nvml.session() as found:
        if isinstance(found, nvml.Unavailable):
            pytest.skip("no GPU on this machine")
    health = gpu_readings.read_gpu(0)
    assert health.available
    assert health.throttle_reasons is not None
    assert health.sm_clock_max_mhz
