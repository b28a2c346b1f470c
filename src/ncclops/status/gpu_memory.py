"""Memory in use on the GPU of each rank, through NVML. What cannot be known is None."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ncclops.host import nvml
from ncclops.host.gpu_readings import visible_device
from ncclops.record.documents import read_document
from ncclops.record.paths import RunPaths


class GpuMemory:
    """Asks NVML, which is started once. ``run_dir`` says which rank has which GPU."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._nvml = nvml.start()
        self._devices: dict[int, int | str | None] = {}

    def gib(self, rank: int) -> float | None:
        """GiB in use on the GPU of ``rank``, by all processes."""
        if isinstance(self._nvml, nvml.Unavailable):
            return None
        if rank not in self._devices:
            self._devices[rank] = self._device(rank)
        return _used_gib(self._nvml, self._devices[rank])

    def _device(self, rank: int) -> int | str | None:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            path = RunPaths(self._run_dir).rank(rank).environment
            environ: Mapping[str, str] = read_document(path)["variables"]
            return visible_device(int(environ["LOCAL_RANK"]), environ)
        return None


def _used_gib(found: nvml.Nvml, device: int | str | None) -> float | None:
    if device is None:
        return None
    try:
        gpu = found.device(device)
        memory = gpu.ask("nvmlDeviceGetMemoryInfo") if isinstance(gpu, nvml.Device) else None
    except nvml.GpuLostError:
        return None
    return None if memory is None else round(memory.used / 2**30, 3)
