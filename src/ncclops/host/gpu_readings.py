"""What NVML says about a GPU, the hardware side of a straggler. "Not available" is None."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ncclops.host import nvml

# Bits of NVML's clock event reasons. Idle and clocks set by an application are no complaint.
_REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
# A GPU at work runs within a few percent of its clock; well below that something holds it.
_SLOW_CLOCK = 0.9
# GPUs of a machine that do the same have the same clock, all but this share.
_SAME_CLOCK = 0.95


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """One GPU at one moment. Clocks in MHz; ECC errors since the driver was loaded."""

    device: int | str
    name: str | None = None
    uuid: str | None = None
    utilization_percent: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    temperature_c: int | None = None
    processes: int | None = None

    @property
    def available(self) -> bool:
        """Whether NVML knows this GPU at all."""
        return self.uuid is not None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def complaints(self) -> list[str]:
        """What is not as it should be, in words; empty if nothing is, or nothing is known."""
        said = [f"slowed by {reason}" for reason in self.throttle_reasons or ()]
        if _below(self.pcie_width, self.pcie_width_max, 1):
            said.append(f"PCIe x{self.pcie_width} of x{self.pcie_width_max}")
        busy = self.utilization_percent is not None and self.utilization_percent > 0
        # An idle GPU lowers its clock and its link's generation by itself.
        if busy and _below(self.pcie_generation, self.pcie_generation_max, 1):
            said.append(f"PCIe generation {self.pcie_generation} of {self.pcie_generation_max}")
        if busy and _below(self.sm_clock_mhz, self.sm_clock_max_mhz, _SLOW_CLOCK):
            said.append(f"SM clock {self.sm_clock_mhz} of {self.sm_clock_max_mhz} MHz")
        if self.ecc_uncorrected:
            said.append(f"{self.ecc_uncorrected} uncorrected ECC errors")
        return said


def what_differs(own: Sequence[GpuHealth], others: Sequence[GpuHealth]) -> list[str]:
    """What speaks against a GPU in most of its ``own`` readings, and against ``others`` does not.

    A GPU at its power cap is nothing special where all are.
    """
    general = {kind for kind, share in _shares(others).items() if share > 0.5}
    often = {kind for kind, share in _shares(own).items() if share >= 0.5}
    last = {_kind_of(text): text for reading in own for text in reading.complaints()}
    own_kinds = often - general
    said = [text for kind, text in last.items() if kind in own_kinds]
    clock, usual = _middle(own, "sm_clock_mhz"), _middle(others, "sm_clock_mhz")
    if clock and usual and clock < usual * _SAME_CLOCK and "SM clock" not in own_kinds:
        said.append(f"SM clock {clock:.0f} MHz, others {usual:.0f}")
    used, usually = _middle(own, "processes"), _middle(others, "processes")
    if used and usually and used > usually:
        said.append(f"{used:.0f} processes on it, {usually:.0f} on others")
    return said


def visible_device(local_rank: int, environ: Mapping[str, str] = os.environ) -> int | str | None:
    """The GPU that CUDA numbers ``local_rank``: NVML's number or UUID; None if there is none."""
    return nvml.visible_device(local_rank, environ.get("CUDA_VISIBLE_DEVICES"))


def read_gpu(device: int | str) -> GpuHealth:
    """Look at ``device`` (NVML's number, or a UUID). Without NVML or the GPU all else is None."""
    with nvml.session() as found:
        if isinstance(found, nvml.Unavailable):
            return GpuHealth(device=device)
        try:
            gpu = found.device(device)
            if isinstance(gpu, nvml.Unavailable):
                return GpuHealth(device=device)
            return _read(gpu, device)
        except nvml.GpuLostError:
            return GpuHealth(device=device)


def is_active(device: int | str) -> bool | None:
    """Whether kernels have run on ``device`` in the last moments; None where nothing can say."""
    percent = read_gpu(device).utilization_percent
    return None if percent is None else percent > 0


def _read(gpu: nvml.Device, device: int | str) -> GpuHealth:
    constants = gpu.nvml.bindings
    reasons = gpu.query("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name up to driver 535
        reasons = gpu.query("nvmlDeviceGetCurrentClocksThrottleReasons")
    utilization = gpu.query("nvmlDeviceGetUtilizationRates")
    processes = gpu.query("nvmlDeviceGetComputeRunningProcesses")
    return GpuHealth(
        device=device,
        name=gpu.query("nvmlDeviceGetName"),
        uuid=gpu.query("nvmlDeviceGetUUID"),
        utilization_percent=None if utilization is None else utilization.gpu,
        throttle_reasons=None if reasons is None else _reasons(reasons),
        sm_clock_mhz=gpu.query("nvmlDeviceGetClockInfo", constants.NVML_CLOCK_SM),
        sm_clock_max_mhz=gpu.query("nvmlDeviceGetMaxClockInfo", constants.NVML_CLOCK_SM),
        pcie_width=gpu.query("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=gpu.query("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation=gpu.query("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=gpu.query("nvmlDeviceGetMaxPcieLinkGeneration"),
        ecc_corrected=gpu.ecc_errors(corrected=True),
        ecc_uncorrected=gpu.ecc_errors(corrected=False),
        temperature_c=gpu.query("nvmlDeviceGetTemperature", constants.NVML_TEMPERATURE_GPU),
        processes=None if processes is None else len(processes),
    )


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


def _below(value: int | None, best: int | None, share: float) -> bool:
    return value is not None and best is not None and value < best * share


def _kind_of(complaint: str) -> str:
    """The complaint without its figures."""
    return re.split(r" x?\d", complaint)[0]


def _shares(readings: Sequence[GpuHealth]) -> dict[str, float]:
    """In what share of the readings there is each kind of complaint."""
    counts = Counter(kind for each in readings for kind in set(map(_kind_of, each.complaints())))
    return {kind: count / len(readings) for kind, count in counts.items()}


def _middle(readings: Sequence[GpuHealth], name: str) -> float | None:
    values = [value for each in readings if (value := getattr(each, name)) is not None]
    return median(values) if values else None
