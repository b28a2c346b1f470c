"""What NVML says about a GPU, the hardware side of a straggler. "Not available" is None."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")

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


def visible_device(local_rank: int, environ: Mapping[str, str] = os.environ) -> int | str | None:
    """The GPU that CUDA numbers ``local_rank``: NVML's index, or a UUID; None if there is none.

    NVML counts all GPUs of the node, whatever ``CUDA_VISIBLE_DEVICES`` says.
    """
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return local_rank
    entries = [entry.strip() for entry in setting.split(",")]
    if local_rank >= len(entries):
        return None
    entry = entries[local_rank]
    if entry.isdecimal():
        return int(entry)
    return entry if entry.startswith(("GPU-", "MIG-")) else None


def read_gpu(device: int | str) -> GpuHealth:
    """Look at ``device`` (NVML's index, or a UUID). Without NVML or the GPU everything is None."""
    with _nvml() as nvml:
        handle = None if nvml is None else _ask(nvml, lambda: _handle(nvml, device))
        if nvml is None or handle is None:
            return GpuHealth(device=device)
        return _read(nvml, handle, device)


def is_active(device: int | str) -> bool | None:
    """Whether kernels have run on ``device`` in the last moments; None where nobody can say."""
    percent = read_gpu(device).utilization_percent
    return None if percent is None else percent > 0


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no library, no driver, no permission: no NVML
        yield None
        return
    try:
        yield pynvml
    finally:
        _ask(pynvml, pynvml.nvmlShutdown)


def _ask(nvml: Any, question: Callable[[], Value]) -> Value | None:
    # AttributeError: a release of the bindings or of the driver without this question.
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return None


def _handle(nvml: Any, device: int | str) -> Any:
    if isinstance(device, int):
        return nvml.nvmlDeviceGetHandleByIndex(device)
    return nvml.nvmlDeviceGetHandleByUUID(device.encode())


def _read(nvml: Any, handle: Any, device: int | str) -> GpuHealth:
    def ask(name: str, *arguments: Any) -> Any:
        return _ask(nvml, lambda: getattr(nvml, name)(handle, *arguments))

    def errors(kind: str) -> Any:
        return _ask(
            nvml,
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, getattr(nvml, kind), nvml.NVML_VOLATILE_ECC
            ),
        )

    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name up to driver 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    utilization = ask("nvmlDeviceGetUtilizationRates")
    return GpuHealth(
        device=device,
        name=_text(ask("nvmlDeviceGetName")),
        uuid=_text(ask("nvmlDeviceGetUUID")),
        utilization_percent=None if utilization is None else utilization.gpu,
        throttle_reasons=None if reasons is None else _reasons(reasons),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        sm_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        ecc_corrected=errors("NVML_MEMORY_ERROR_TYPE_CORRECTED"),
        ecc_uncorrected=errors("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
    )


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


def _below(value: int | None, best: int | None, share: float) -> bool:
    return value is not None and best is not None and value < best * share


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
