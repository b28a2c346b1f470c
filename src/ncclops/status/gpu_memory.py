"""Memory in use on the GPU of each rank, through NVML. What cannot be known is None."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ncclops.env.snapshot import FILE_NAME
from ncclops.host.gpu_readings import visible_device


class GpuMemory:
    """Asks NVML, which is started once. ``run_dir`` says which rank has which GPU."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._nvml = _start_nvml()
        self._devices: dict[int, int | str | None] = {}

    def gib(self, rank: int) -> float | None:
        """GiB in use on the GPU of ``rank``, by whoever uses it."""
        if self._nvml is None:
            return None
        if rank not in self._devices:
            self._devices[rank] = self._device(rank)
        return _used_gib(self._nvml, self._devices[rank])

    def _device(self, rank: int) -> int | str | None:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            path = self._run_dir / "ranks" / str(rank) / FILE_NAME
            environ: Mapping[str, str] = json.loads(path.read_text())["variables"]
            return visible_device(int(environ["LOCAL_RANK"]), environ)
        return None


def _start_nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no library, no driver, no permission: no NVML
        return None
    return pynvml


def _used_gib(nvml: Any, device: int | str | None) -> float | None:
    if device is None:
        return None
    try:
        if isinstance(device, int):
            handle = nvml.nvmlDeviceGetHandleByIndex(device)
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(device.encode())
        used_bytes: int = nvml.nvmlDeviceGetMemoryInfo(handle).used
        return round(used_bytes / 2**30, 3)
    except nvml.NVMLError:
        return None
