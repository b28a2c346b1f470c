"""What readings of a GPU mean, and which GPU is a rank's."""

from __future__ import annotations

from dataclasses import replace

from ncclops.host import gpu_readings
from ncclops.host.gpu_readings import GpuHealth

BUSY = GpuHealth(
    device=0,
    uuid="GPU-1",
    utilization_percent=90,
    throttle_reasons=(),
    sm_clock_mhz=1980,
    sm_clock_max_mhz=1980,
    pcie_width=16,
    pcie_width_max=16,
    pcie_generation=5,
    pcie_generation_max=5,
    ecc_uncorrected=0,
)


def test_a_gpu_at_work_is_compared_with_what_it_could_do() -> None:
    assert BUSY.complaints() == []
    slow = replace(BUSY, sm_clock_mhz=1700, pcie_generation=3, throttle_reasons=("sync boost",))
    assert slow.complaints() == [
        "slowed by sync boost",
        "PCIe generation 3 of 5",
        "SM clock 1700 of 1980 MHz",
    ]


def test_an_idle_gpu_lowers_its_clock_and_its_generation_but_not_its_lanes() -> None:
    idle = replace(BUSY, utilization_percent=0, sm_clock_mhz=300, pcie_generation=1)
    assert idle.complaints() == []
    assert replace(idle, pcie_width=8).complaints() == ["PCIe x8 of x16"]


def test_nothing_is_complained_of_where_nothing_is_known() -> None:
    assert GpuHealth(device=0).complaints() == []


def test_what_all_gpus_of_a_machine_show_is_no_cause() -> None:
    capped = replace(BUSY, sm_clock_mhz=1500, throttle_reasons=("software power cap",))
    slow = replace(capped, sm_clock_mhz=1005, processes=2)
    others = [replace(capped, processes=1), capped]
    assert gpu_readings.what_differs([slow, slow], others) == [
        "SM clock 1005 MHz, others 1500",
        "2 processes on it, 1 on others",
    ]
    assert gpu_readings.what_differs([slow], []) == [
        "slowed by software power cap",
        "SM clock 1005 of 1980 MHz",
    ]


def test_what_one_reading_in_three_shows_is_no_cause() -> None:
    once = replace(BUSY, throttle_reasons=("sync boost",))
    assert gpu_readings.what_differs([BUSY, once, BUSY], [BUSY]) == []
    assert gpu_readings.what_differs([once, once, BUSY], [BUSY]) == ["slowed by sync boost"]
    assert gpu_readings.what_differs([], [BUSY]) == []


def test_the_gpu_of_a_rank_follows_cuda_visible_devices() -> None:
    assert gpu_readings.visible_device(3, {}) == 3
    assert gpu_readings.visible_device(1, {"CUDA_VISIBLE_DEVICES": "4, 6"}) == 6
    assert gpu_readings.visible_device(0, {"CUDA_VISIBLE_DEVICES": "GPU-1234"}) == "GPU-1234"
    assert gpu_readings.visible_device(2, {"CUDA_VISIBLE_DEVICES": "4,6"}) is None
    assert gpu_readings.visible_device(0, {"CUDA_VISIBLE_DEVICES": ""}) is None
