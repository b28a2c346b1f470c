"""A rank's GPU, its NVLinks and its NIC: what is measured, and what that says about them.

The judgements are pure. There are three, because "could not look" is neither good nor bad: a
machine without NVML must not lose its ranks, and must not be called healthy either. Measuring,
through NVML and sysfs, may hang on a broken machine; callers bound it with a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from ncclops.host.nvml import Device, GpuLostError, GpuName, Recovery, Unavailable, session


class Health(enum.Enum):
    """The outcome of a check."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    NOT_CHECKED = "not checked"


@dataclasses.dataclass(frozen=True)
class Finding:
    """An outcome and the evidence for it, in words."""

    health: Health
    detail: str


@dataclasses.dataclass(frozen=True)
class Port:
    """One port of a NIC: whether its link is up, and how often it went down since boot."""

    active: bool
    link_downed: int | None = None


def judge_gpu(reading: Recovery) -> Finding:
    """Unhealthy when the driver asks for a recovery action or memory is beyond repair."""
    if reading.need is not None:
        return Finding(Health.UNHEALTHY, reading.need)
    if reading.action is None and reading.remap_failed is None:
        return Finding(Health.NOT_CHECKED, "this driver reports no recovery state")
    return Finding(Health.HEALTHY, "the driver asks for no recovery")


def judge_links(before: Mapping[int, bool] | None, now: Mapping[int, bool] | None) -> Finding:
    """Unhealthy when an NVLink that was active ``before`` is not active ``now``.

    Only a comparison shows that: many systems leave some links of a GPU unconnected.
    """
    if before is None or now is None:
        return Finding(Health.NOT_CHECKED, "the NVLink states are not known")
    if not any(before.values()):
        return Finding(Health.NOT_CHECKED, "no NVLink was active at the start")
    down = sorted(link for link, active in before.items() if active and not now.get(link, False))
    if down:
        return Finding(Health.UNHEALTHY, f"NVLinks {down} were active at the start, and are down")
    return Finding(Health.HEALTHY, f"{sum(before.values())} NVLinks are active, as at the start")


def judge_ports(before: Mapping[str, Port] | None, now: Mapping[str, Port]) -> Finding:
    """Unhealthy when a NIC port that was active ``before`` is not active ``now``.

    A port that went down and came back is healthy: the restart has dealt with the interruption,
    and giving up the rank would make a loss of a short interruption. The detail has it.
    """
    if before is None:
        return Finding(Health.NOT_CHECKED, "which NIC serves this GPU is not known")
    used = {name: port for name, port in before.items() if port.active}
    if not used:
        return Finding(Health.NOT_CHECKED, "no NIC port near this GPU was active at the start")
    down = sorted(name for name in used if not (name in now and now[name].active))
    if down:
        return Finding(Health.UNHEALTHY, f"NIC ports {down} were active at the start, and are down")
    flapped = sorted(name for name, port in used.items() if _went_down(port, now[name]))
    if flapped:
        return Finding(Health.HEALTHY, f"NIC ports {flapped} went down meanwhile, and are back")
    return Finding(Health.HEALTHY, f"NIC ports {sorted(used)} are active, as at the start")


def nearest(gpu: PurePath, nics: Mapping[str, PurePath]) -> list[str]:
    """The NICs that share the longest part of the PCI tree with ``gpu``, by sysfs paths.

    Empty when none shares so much as a PCI root: then it is not known which NIC the GPU uses.
    """
    shared = {name: _shared_pci_parts(gpu, path) for name, path in nics.items()}
    best = max(shared.values(), default=0)
    return sorted(name for name, count in shared.items() if count == best and best > 0)


def _went_down(before: Port, now: Port) -> bool:
    counts: Sequence[int | None] = (before.link_downed, now.link_downed)
    return None not in counts and before.link_downed != now.link_downed


def _shared_pci_parts(one: PurePath, other: PurePath) -> int:
    pairs = list(zip(one.parts, other.parts, strict=False))
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return sum(part.startswith("pci") or ":" in part for part in one.parts[:common])


class NotAvailableError(Exception):
    """NVML has no answer; the message says why. Not a sign of a broken GPU."""


# By selector. Kept, since a GPU that is lost does not say its name any more.
_names: dict[int | str, GpuName] = {}


def describe_gpu(selector: int | str | None) -> str:
    """The GPU and its host, by what NVML said when it was last asked for the GPU."""
    name = GpuName() if selector is None else _names.get(selector, GpuName.of_selector(selector))
    return f"{name} on {socket.gethostname()}"


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
        if selector not in _names:
            with contextlib.suppress(GpuLostError):
                _names[selector] = device.name
        yield device


def learn_name(selector: int | str | None) -> None:
    """Have ``describe_gpu`` know more than the number. Raises as ``nvml_device``."""
    with nvml_device(selector):
        pass


def read_gpu(selector: int | str | None) -> Recovery:
    """The GPU's recovery state. Raises as ``nvml_device``."""
    with nvml_device(selector) as device:
        return device.recovery()


def read_links(selector: int | str | None) -> dict[int, bool]:
    """Whether each NVLink that the GPU has is active. Raises as ``nvml_device``."""
    with nvml_device(selector) as device:
        states = {
            link: device.query("nvmlDeviceGetNvLinkState", link)
            for link in range(device.nvml.bindings.NVML_NVLINK_MAX_LINKS)
        }
    return {link: bool(active) for link, active in states.items() if active is not None}


def gpu_pci_path(selector: int | str | None, sysfs: Path) -> Path:
    """Where the GPU is in the PCI tree. Raises as ``nvml_device``."""
    with nvml_device(selector) as device:
        address = device.pci
    if address is None:
        raise NotAvailableError("NVML does not report the PCI address of the GPU")
    return (sysfs / "bus/pci/devices" / address).resolve()


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
