"""A worker's peak memory, without importing torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, NamedTuple

Source = Literal["cuda", "rss"]


class Peak(NamedTuple):
    """``source`` is ``cuda`` (allocated on the current device) or ``rss`` (of the process)."""

    gib: float
    source: Source


def peak_memory() -> Peak:
    """The most memory this process has used: of its GPU if torch has one open, else resident.

    Never opens a GPU: a script that has not done so by now has none to report.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return Peak(torch.cuda.max_memory_allocated() / 2**30, "cuda")
    return Peak(_peak_resident_kib() / 2**20, "rss")


def _peak_resident_kib() -> int:
    # Not getrusage(): its maximum survives exec, so a small program would report its parent's.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
