"""Memory in use on the GPU of each rank, through NVML. What cannot be known is None."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ncclops.errors import UsageError
from ncclops.host import nvml
from ncclops.host.gpu_readings import visible_device
from ncclops.record.environment_record import ENVIRONMENT
from ncclops.record.paths import RunPaths


class GpuMemory:
    """Queries NVML, which is started once. ``run_dir`` shows which rank has which GPU."""

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
        with suppress(UsageError, OSError, ValueError, KeyError):
            found = ENVIRONMENT.read(RunPaths(self._run_dir).rank(rank).environment)
            if found is not None:
                return visible_device(int(found.variables["LOCAL_RANK"]), found.variables)
        return None


def _used_gib(found: nvml.Nvml, device: int | str | None) -> float | None:
    if device is None:
        return None
    try:
        gpu = found.device(device)
        memory = gpu.query("nvmlDeviceGetMemoryInfo") if isinstance(gpu, nvml.Device) else None
    except nvml.GpuLostError:
        return None
    return None if memory is None else round(memory.used / 2**30, 3)
