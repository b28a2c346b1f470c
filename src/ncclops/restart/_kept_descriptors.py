"""Descriptors put by for what has to be opened although the script has used up all others."""

from __future__ import annotations

import os
from contextlib import suppress

# Two each. A connection to the store takes one, a look at what it has opened two for a moment.
_PIPES = 2


class KeptDescriptors:
    """A few descriptors, until they are given back; fewer, or none, where there are no more."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}
        with suppress(OSError):
            for _ in range(_PIPES):
                for end in os.pipe():
                    self._inodes[end] = os.fstat(end).st_ino

    def give(self) -> None:
        """Free them. What the script has closed may be a file of its own by now, and stays open."""
        while self._inodes:
            descriptor, inode = self._inodes.popitem()
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)
