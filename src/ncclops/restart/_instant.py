"""When something happened, for measuring how long ago that was. Standard library only.

The wall clock is for people: it may be set at any time, and those of two hosts differ. Monotonic
clocks are not set, and all processes of a host share one; those of two hosts have nothing to do
with each other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import zlib
from pathlib import Path
from typing import NamedTuple

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = "/proc/self/ns/time"


class Instant(NamedTuple):
    """A reading of a monotonic clock, in seconds, and which clock that is."""

    monotonic_s: float
    clock: str

    @classmethod
    def now(cls) -> Instant:
        """By the clock of this process."""
        return cls(round(time.monotonic(), 6), _own_clock())

    def seconds_until(self, later: Instant) -> float | None:
        """From this one to ``later``; ``None`` when they are readings of two clocks."""
        return later.monotonic_s - self.monotonic_s if self.clock == later.clock else None


@functools.cache
def _own_clock() -> str:
    """The same in all processes of this host that have the same clock, and short."""
    name = os.uname().nodename
    with contextlib.suppress(OSError):
        name = _BOOT.read_text()
    with contextlib.suppress(OSError):  # containers may have an offset of their own
        name += os.readlink(_TIME_NAMESPACE)  # noqa: PTH115 - its target is no path
    return f"{zlib.crc32(os.fsencode(name)):08x}"
