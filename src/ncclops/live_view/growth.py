"""Whether a file has grown, for a loop that waits for several things."""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ncclops.record.tail import GrowthWatch


class Growth:
    """Watches ``path``. ``has_grown`` stays until it is set back.

    Raises ``OSError`` where the process may have no more descriptors.
    """

    def __init__(self, path: Path) -> None:
        self.has_grown = False
        self._watch = GrowthWatch()
        with suppress(OSError):
            self._watch.add(path)

    @property
    def files(self) -> Sequence[int]:
        """Readable when it grows; none while that is known already."""
        return () if self.has_grown else (self._watch.fileno(),)

    def take(self) -> None:
        """Note what the kernel has reported."""
        if select.select([self._watch.fileno()], [], [], 0)[0]:
            self._watch.wait()
            self.has_grown = True

    def close(self) -> None:
        self._watch.close()
