"""Measuring the GPU through NVML and NICs through sysfs. "Not available" is a value here.

The only module of the restart core that touches NVML. Everything may hang on a sick machine;
callers bound it with a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ncclops.restart._device_health import GpuReading, Port, nearest

T = TypeVar("T")


class NotAvailableError(Exception):
    """NVML cannot tell; the message says why. Not a sign of a sick GPU."""


class GpuLostError(Exception):
    """NVML cannot reach the GPU any more, or refuses to before a reset."""


@dataclasses.dataclass(frozen=True)
class NvmlDevice:
    """One GPU while an NVML session lasts."""

    nvml: Any
    handle: Any

    def ask(self, question: Callable[[], T]) -> T | None:
        """The answer, or ``None`` where this GPU or driver does not know the question."""
        try:
            return question()
        except self.nvml.NVMLError as error:
            if error.value in _lost_codes(self.nvml):
                raise
            return None


@contextlib.contextmanager
def nvml_device(selector: int | str | None) -> Iterator[NvmlDevice]:
    """The GPU of the given NVML number or UUID.

    Raises ``NotAvailableError`` where there is no NVML or no such GPU, and ``GpuLostError`` when
    NVML says so of the GPU, also while the session lasts.
    """
    if selector is None:
        raise NotAvailableError("this rank has no GPU of its own that is visible")
    try:
        import pynvml
    except ImportError:
        raise NotAvailableError("pynvml is not installed (package nvidia-ml-py)") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NotAvailableError(f"NVML is not available: {error}") from error
    try:
        yield NvmlDevice(pynvml, _handle(pynvml, selector))
    except pynvml.NVMLError as error:
        raise GpuLostError(f"the GPU does not answer: {error}") from error
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read_gpu(selector: int | str | None) -> GpuReading:
    """The GPU's recovery state. Raises as ``nvml_device``."""
    with nvml_device(selector) as device:
        return GpuReading(_recovery_action(device), _remap_failed(device))


def read_links(selector: int | str | None) -> dict[int, bool]:
    """Whether each NVLink that the GPU has is active. Raises as ``nvml_device``."""
    with nvml_device(selector) as device:
        nvml = device.nvml
        states = {
            link: device.ask(partial(nvml.nvmlDeviceGetNvLinkState, device.handle, link))
            for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        }
    return {link: bool(active) for link, active in states.items() if active is not None}


def gpu_pci_path(selector: int | str | None, sysfs: Path) -> Path:
    """Where the GPU is in the PCI tree. Raises as ``nvml_device``."""
    with nvml_device(selector) as device:
        info = device.ask(lambda: device.nvml.nvmlDeviceGetPciInfo(device.handle))
        if info is None:
            raise NotAvailableError("NVML does not tell the PCI address of the GPU")
        text = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
    # NVML writes the domain with 8 digits, sysfs with 4: 00000000:18:00.0 is 0000:18:00.0.
    domain, rest = text.lower().split(":", 1)
    return (sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}").resolve()


def nics_near(gpu: Path, sysfs: Path) -> list[str]:
    """Names of the RDMA devices that share most of the PCI tree with ``gpu``."""
    devices = {path.name: (path / "device").resolve() for path in _rdma_devices(sysfs)}
    return nearest(gpu, devices)


def read_ports(nics: list[str], sysfs: Path) -> dict[str, Port]:
    """The ports of the given RDMA devices, as ``device/port``; unreadable ones are left out."""
    ports = {}
    for device in _rdma_devices(sysfs):
        if device.name not in nics:
            continue
        for port in sorted((device / "ports").glob("*")):
            with contextlib.suppress(OSError):
                ports[f"{device.name}/{port.name}"] = _port(port)
    return ports


def _rdma_devices(sysfs: Path) -> list[Path]:
    return sorted((sysfs / "class/infiniband").glob("*"))


def _port(port: Path) -> Port:
    # The kernel writes "4: ACTIVE" (ibverbs' port states).
    active = (port / "state").read_text().strip().startswith("4:")
    try:
        downed = int((port / "counters/link_downed").read_text())
    except (OSError, ValueError):  # drivers without hardware counters
        downed = None
    return Port(active, downed)


def _handle(nvml: Any, selector: int | str) -> Any:
    try:
        if isinstance(selector, int):
            return nvml.nvmlDeviceGetHandleByIndex(selector)
        return nvml.nvmlDeviceGetHandleByUUID(selector)
    except nvml.NVMLError as error:
        if error.value in _lost_codes(nvml):
            raise
        raise NotAvailableError(f"NVML does not know GPU {selector}: {error}") from error


def _recovery_action(device: NvmlDevice) -> int | None:
    nvml = device.nvml
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)  # older nvidia-ml-py
    if field is None:
        return None
    values = device.ask(lambda: nvml.nvmlDeviceGetFieldValues(device.handle, [field]))
    if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _remap_failed(device: NvmlDevice) -> bool | None:
    rows = device.ask(lambda: device.nvml.nvmlDeviceGetRemappedRows(device.handle))
    return None if rows is None else bool(rows[3])


def _lost_codes(nvml: Any) -> tuple[int, ...]:
    """Errors that speak of the GPU itself rather than of what it can tell."""
    return (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
