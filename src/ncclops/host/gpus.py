"""How many GPUs a worker started here could use: the one place that counts them.

NVML is asked first. Without it the driver's files are counted, which containers may hide, or show
where there is nothing behind them. Nothing here needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ncclops.host import nvml


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a worker started here could use.

    ``driver`` is the version of the driver, None where NVML does not say. ``names`` holds "GPU"
    for one that only the driver's files show; ``remark`` then says so.
    """

    names: tuple[str, ...] = ()
    driver: str | None = None
    remark: str | None = None

    @property
    def count(self) -> int:
        return len(self.names)


def find_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Gpus:
    """GPUs that NVML knows and ``CUDA_VISIBLE_DEVICES`` of ``environ`` leaves visible.

    Looked up once in a process: the GPUs of a node stay, and starting NVML takes a moment.
    """
    return _find(environ.get("CUDA_VISIBLE_DEVICES"), root)


@cache
def _find(setting: str | None, root: Path) -> Gpus:
    with nvml.session() as found:
        if isinstance(found, nvml.Unavailable):
            names = _visible(["GPU"] * _driver_files(root), setting)
            return Gpus(names, remark=_remark(len(names), found.reason))
        names = _visible(_names(found), setting)
        return Gpus(names, found.query("nvmlSystemGetDriverVersion"))


def _names(found: nvml.Nvml) -> list[str]:
    """One for each GPU; that of a GPU which does not answer is "GPU", it is there all the same."""
    names = []
    for index in range(found.query("nvmlDeviceGetCount") or 0):
        try:
            device = found.device(index)
            name = device.query("nvmlDeviceGetName") if isinstance(device, nvml.Device) else None
        except nvml.GpuLostError:
            name = None
        names.append(name or "GPU")
    return names


def _driver_files(root: Path) -> int:
    """NVIDIA GPUs by the driver's files, 0 without a driver."""
    listed = root / "proc/driver/nvidia/gpus"
    if listed.is_dir():
        return len(list(listed.iterdir()))
    # Containers may hide /proc/driver while they hand in the devices.
    return len(list((root / "dev").glob("nvidia[0-9]*")))


def _remark(count: int, reason: str) -> str | None:
    if not count:
        return None
    return f"{count} GPU{'s' * (count != 1)} counted by the driver's files, since {reason}"


def _visible(names: list[str], setting: str | None) -> tuple[str, ...]:
    """``names`` after CUDA's rule: listed entries in their order, up to the first invalid one."""
    selectors = nvml.visible_devices(setting)
    if selectors is None:
        return tuple(names)
    visible = []
    for selector in selectors:
        if isinstance(selector, str):
            visible.append(names[0] if names else "GPU")  # nodes carry GPUs of one kind
        elif selector < len(names):
            visible.append(names[selector])
        else:
            break
    return tuple(visible)
