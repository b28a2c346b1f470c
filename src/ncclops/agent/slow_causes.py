"""Why a rank is slow, as far as this machine knows: readings of the GPUs of all its ranks.

Taken while a rank is suspected, since a GPU that has nothing to do any more shows neither its clock
under load nor what slows it. In a thread, because a sick driver may never answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from ncclops.host import gpu_readings
from ncclops.host.gpu_readings import GpuHealth

# No reading more often than this, and so many are looked at.
_PAUSE_S = 2.0
_READINGS = 15
# Of its time a main thread that others wait for is kept from a CPU.
_CPU_SHARE = 0.05

Devices = Mapping[int, int | str | None]


class SlowCauses:
    """Of the ranks in ``devices``, with the GPU of each where it has one."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._readings: deque[Mapping[int, GpuHealth]] = deque(maxlen=_READINGS)
        self._delays: deque[tuple[float, Mapping[int, float]]] = deque(maxlen=_READINGS)
        self._looked_at: float | None = None
        self._looking: threading.Thread | None = None

    def look(self, pids: Mapping[int, int]) -> None:
        """A rank is suspected; ``pids`` are the processes of the ranks that run."""
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at < _PAUSE_S:
            return
        self._looked_at = now
        self._delays.append((now, {rank: _delay_s(pid) for rank, pid in pids.items()}))
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._read, name="ncclops-gpu", daemon=True)
            self._looking.start()

    def of(self, rank: int) -> tuple[GpuHealth | None, list[str]]:
        """The last reading of the GPU of ``rank``, and what speaks against it and its process."""
        readings = list(self._readings)
        own = [each[rank] for each in readings if rank in each]
        others = [reading for each in readings for other, reading in each.items() if other != rank]
        causes = gpu_readings.what_differs(own, others) + self._waits_for_cpu(rank)
        return own[-1] if own else None, causes

    def _read(self) -> None:
        found = {}
        for rank, device in self._devices.items():
            if device is not None and (health := gpu_readings.read_gpu(device)).available:
                found[rank] = health
        if found:
            self._readings.append(found)

    def _waits_for_cpu(self, rank: int) -> list[str]:
        if len(self._delays) < 2:
            return []
        (began, before), (ended, after) = self._delays[0], self._delays[-1]
        both = before.keys() & after.keys()
        shares = {each: (after[each] - before[each]) / (ended - began) for each in both}
        mine = shares.pop(rank, 0.0)
        usual = median(shares.values()) if shares else 0.0
        if mine - usual < _CPU_SHARE:
            return []
        return [f"its main thread waited {mine:.0%} of the time for a CPU, others {usual:.0%}"]


def _delay_s(pid: int) -> float:
    """How long the main thread has been ready to run and did not; 0 where that is not known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
