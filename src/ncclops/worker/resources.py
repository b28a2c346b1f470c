"""What a process holds when an iteration starts, and whether it grows over restarts in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ncclops.profiles.model import Growth

_GIB = 2**30
# Less of a change in the free memory of a GPU is other processes' doing, or the driver's.
_GPU_NOISE_GIB = 0.05


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Before the script runs (again). GPU memory in GiB, None where CUDA is not in use.

    ``gpu_tensors_gib`` is what tensors still hold; ``gpu_memory_gib`` all of the device's memory
    that this process cannot use any more: tensors, and what is in use outside torch's allocator.
    """

    gpu_memory_gib: float | None
    gpu_tensors_gib: float | None
    fds: int
    threads: int
    process_groups: int

    def as_json(self) -> dict[str, float | int | None]:
        return {name: getattr(self, name) for name in _COUNTED}


_COUNTED = ("gpu_memory_gib", "gpu_tensors_gib", "fds", "threads", "process_groups")


def measure() -> Usage:
    """Of this process now; creates no CUDA context."""
    whole, tensors = _gpu_memory_gib()
    return Usage(
        gpu_memory_gib=whole,
        gpu_tensors_gib=tensors,
        fds=len(os.listdir("/proc/self/fd")) - 1,  # noqa: PTH208 - without the listing's own
        threads=len(os.listdir("/proc/self/task")),  # noqa: PTH208
        process_groups=_process_groups(),
    )


class Balance:
    """Compares the starts of iterations. Pure.

    The first iteration's start is no measure for threads, files and GPU memory: the libraries that
    it loads, a CUDA context and pools of threads come once and stay. So these are counted from
    the second on; tensors and process groups ought to be gone at every start.
    """

    def __init__(self, budget: Growth) -> None:
        self._budget = budget
        self._first: Usage | None = None  # of the iterations that can be compared
        self._last: Usage | None = None
        self.grown: Mapping[str, float] = {}  # since the iteration before

    def start(self, now: Usage) -> str | None:
        """An iteration starts with ``now``; the budget that is exceeded, in words, if one is."""
        before, self._last = self._last, now
        if before is None:
            return None
        if self._first is None:
            self.grown = _growth(_without_one_offs(before), _without_one_offs(now))
            self._first = now
        else:
            self.grown = _growth(before, now)
        return next(iter(self._exceeded(now)), None)

    def _exceeded(self, now: Usage) -> list[str]:
        assert self._first is not None
        limits = {
            "gpu_memory_gib": self._budget.gpu_memory_gib,
            "fds": self._budget.fds,
            "threads": self._budget.threads,
        }
        since_first = _growth(self._first, now)
        found = [
            f"{_WORDS[name]} grew by {since_first[name]:g} over restarts in place, beyond the"
            f" budget of {limit:g}"
            for name, limit in limits.items()
            if since_first.get(name, 0) > limit
        ]
        if (now.gpu_tensors_gib or 0) > self._budget.gpu_memory_gib:
            found.append(
                f"tensors of an interrupted iteration still hold {now.gpu_tensors_gib:g} GiB,"
                f" beyond the budget of {self._budget.gpu_memory_gib:g}"
            )
        if now.process_groups > self._budget.process_groups:
            found.append(
                f"{now.process_groups} process groups of an interrupted iteration are left, beyond"
                f" the budget of {self._budget.process_groups}"
            )
        return found


_WORDS = {
    "gpu_memory_gib": "GPU memory (GiB)",
    "fds": "open files",
    "threads": "threads",
}


def _growth(before: Usage, now: Usage) -> dict[str, float]:
    grown = {}
    for name in _COUNTED:
        old, new = getattr(before, name), getattr(now, name)
        if old is None or new is None:
            continue
        if new - old > (_GPU_NOISE_GIB if name.startswith("gpu") else 0):
            grown[name] = round(new - old, 3)
    return grown


def _without_one_offs(usage: Usage) -> Usage:
    return Usage(
        gpu_memory_gib=None,
        gpu_tensors_gib=usage.gpu_tensors_gib or 0.0,
        fds=0,
        threads=0,
        process_groups=usage.process_groups,
    )


def _gpu_memory_gib() -> tuple[float | None, float | None]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    try:
        free, total = torch.cuda.mem_get_info()
        reserved, tensors = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    except RuntimeError:  # the context is unusable; the script will get the same error
        return None, None
    return round((total - free - (reserved - tensors)) / _GIB, 3), round(tensors / _GIB, 3)


def _process_groups() -> int:
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    return 0 if world is None else len(world.pg_map)
