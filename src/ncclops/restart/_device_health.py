"""Is this GPU, its NVLinks, its NIC fit to go on? Judgements over values that others measured.

Three answers, because "could not look" is neither good nor bad news: a machine without NVML
must not lose its ranks, and must not be called healthy either.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from pathlib import PurePath


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
class GpuReading:
    """What NVML says of a GPU; ``None`` where this driver or GPU does not report it.

    ``recovery_action``: ``nvmlDeviceGpuRecoveryAction_t``. ``remap_failed``: a memory row could
    not be remapped.
    """

    recovery_action: int | None = None
    remap_failed: bool | None = None


@dataclasses.dataclass(frozen=True)
class Port:
    """One port of a NIC: whether its link is up, and how often it went down since boot."""

    active: bool
    link_downed: int | None = None


# nvmlDeviceGpuRecoveryAction_t of nvml.h
_RECOVERY = {
    1: "GPU reset",
    2: "node reboot",
    3: "drain peer-to-peer traffic",
    4: "drain and GPU reset",
    5: "recovery of the IMEX domain",
    6: "PCIe bus reset",
    7: "system reboot",
}


def judge_gpu(reading: GpuReading) -> Finding:
    """Unhealthy when the driver asks for a recovery action or memory is beyond repair.

    Error counters are no reason: contained errors cost the process that met them, and the
    driver's recovery action already says whether the GPU can be used again.
    """
    if reading.recovery_action:
        action = _RECOVERY.get(reading.recovery_action, f"action {reading.recovery_action}")
        return Finding(Health.UNHEALTHY, f"the driver asks for recovery of the GPU: {action}")
    if reading.remap_failed:
        return Finding(Health.UNHEALTHY, "a GPU memory row could not be remapped")
    if reading.recovery_action is None and reading.remap_failed is None:
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
