"""How much is read of output that nobody has read yet when the processes that wrote it have ended.

Ranks can write faster than output is read. What fails stands where reading had come to or in the
last lines, so of what is left beyond a limit the beginning and the end are read. On a machine with
other work even that may take minutes, so there is a limit in time as well: then the last lines are
read, and what is left is passed over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ncclops.record.events import OutputPassedOverEvent
from ncclops.record.run_directory import RunDirectory

# Read within some seconds: 10 to 45 MB/s (`PrintedReceipts` takes most of it), by how much of it
# looks like training. Ranks that are not in a flood are never so far ahead of the reader.
MOST_BYTES = 64 << 20

# Once time is up: a second's worth or two, also with a tenth of a core.
MOST_LAST_BYTES = 2 << 20

Span = tuple[int, int]  # of bytes: the first, and the one after the last


class Patience:
    """How long is read once the processes have ended, in two parts: all that ``gaps`` leaves, then
    the last lines. Any thread may call."""

    ALL_S, LAST_S = 10.0, 10.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at: tuple[float, float] | None = None

    def begin(self) -> None:
        """The processes have ended."""
        now = self._clock()
        if self._ends_at is None:
            self._ends_at = now + self.ALL_S, now + self.ALL_S + self.LAST_S

    def shorten(self, last_s: float) -> None:
        """Only the last lines are wanted, within ``last_s`` seconds from now."""
        now = self._clock()
        before = math.inf if self._ends_at is None else self._ends_at[1]
        self._ends_at = now, min(before, now + last_s)

    @property
    def is_short(self) -> bool:
        """Whether only the last lines are to be read."""
        return self._ends_at is not None and self._clock() >= self._ends_at[0]

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be read."""
        return self._ends_at is not None and self._clock() >= self._ends_at[1]


def gaps(unread: Mapping[Path, Span], most_bytes: int = MOST_BYTES) -> dict[Path, Span]:
    """What is not read of ``unread`` so that ``most_bytes`` in all are; nothing where they suffice.

    Small parts are read whole; of a larger one the gap lies in the middle.
    """
    shares = _shares(unread, most_bytes)
    return {
        path: (begin + shares[path] // 2, end - (shares[path] - shares[path] // 2))
        for path, (begin, end) in unread.items()
        if shares[path] < end - begin
    }


def all_but_the_last(unread: Mapping[Path, Span], most_bytes: int) -> dict[Path, Span]:
    """What is not read of ``unread`` where only its ends are, ``most_bytes`` in all."""
    shares = _shares(unread, most_bytes)
    return {
        path: (begin, end - shares[path])
        for path, (begin, end) in unread.items()
        if shares[path] < end - begin
    }


def _shares(unread: Mapping[Path, Span], most_bytes: int) -> dict[Path, int]:
    """How many bytes of each are read: small ones whole, the others alike."""
    found, left = dict[Path, int](), most_bytes
    by_size = sorted(unread.items(), key=lambda item: item[1][1] - item[1][0])
    for done, (path, (begin, end)) in enumerate(by_size):
        found[path] = min(end - begin, left // (len(by_size) - done))
        left -= found[path]
    return found


def tell(
    run: RunDirectory, say: Callable[[str], None], passed_over: Iterable[tuple[int, Path, Span]]
) -> None:
    """Record and say what was not read: of which rank, in which file, from where to where."""
    for rank, path, (begin, end) in passed_over:
        file = str(path.relative_to(run.path))
        run.add(OutputPassedOverEvent(rank=rank, file=file, begin=begin, end=end))
        say(
            f"rank {rank} wrote more than could be read: {_size(end - begin)} of {run.shown(path)},"
            f" from byte {begin:,} on, are not classified"
        )


def _size(count: int) -> str:
    return f"{count >> 20:,} MiB" if count >= 1 << 20 else f"{count:,} bytes"
