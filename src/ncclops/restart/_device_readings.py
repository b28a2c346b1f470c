"""Measuring the GPU through NVML and NICs through sysfs. "Not available" is a value here.

Everything may hang on a sick machine; callers bound it with a deadline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ncclops.host.nvml import Device, GpuLostError, Unavailable, session, text
from ncclops.restart._device_health import GpuReading, Port, nearest

__all__ = [
    "GpuLostError",
    "NotAvailableError",
    "gpu_pci_path",
    "nics_near",
    "read_gpu",
    "read_links",
    "read_ports",
]


class NotAvailableError(Exception):
    """NVML has no answer; the message says why. Not a sign of a broken GPU."""


@contextlib.contextmanager
def nvml_device(selector: int | str | None) -> Iterator[Device]:
    """The GPU of the given NVML number or UUID.

    Raises ``NotAvailableError`` where there is no NVML or no such GPU, and ``GpuLostError`` when
    NVML says so of the GPU, also while the session lasts.
    """
    if selector is None:
        raise NotAvailableError("this rank has no GPU of its own that is visible")
    with session() as nvml:
        device = nvml if isinstance(nvml, Unavailable) else nvml.device(selector)
        if isinstance(device, Unavailable):
            raise NotAvailableError(device.reason)
        yield device


def read_gpu(selector: int | str | None) -> GpuReading:
    """The GPU's recovery state. Raises as ``nvml_device``."""
    with nvml_device(selector) as device:
        return GpuReading(_recovery_action(device), _remap_failed(device))


def read_links(selector: int | str | None) -> dict[int, bool]:
    """Whether each NVLink that the GPU has is active. Raises as ``nvml_device``."""
    with nvml_device(selector) as device:
        states = {
            link: device.ask("nvmlDeviceGetNvLinkState", link)
            for link in range(device.nvml.bindings.NVML_NVLINK_MAX_LINKS)
        }
    return {link: bool(active) for link, active in states.items() if active is not None}


def gpu_pci_path(selector: int | str | None, sysfs: Path) -> Path:
    """Where the GPU is in the PCI tree. Raises as ``nvml_device``."""
    with nvml_device(selector) as device:
        info = device.ask("nvmlDeviceGetPciInfo")
        if info is None:
            raise NotAvailableError("NVML does not report the PCI address of the GPU")
    # NVML writes the domain with 8 digits, sysfs with 4: 00000000:18:00.0 is 0000:18:00.0.
    domain, rest = text(info.busId).lower().split(":", 1)
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


def _recovery_action(device: Device) -> int | None:
    nvml = device.nvml.bindings
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)  # older nvidia-ml-py
    if field is None:
        return None
    values = device.ask("nvmlDeviceGetFieldValues", [field])
    if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _remap_failed(device: Device) -> bool | None:
    rows = device.ask("nvmlDeviceGetRemappedRows")
    return None if rows is None else bool(rows[3])
