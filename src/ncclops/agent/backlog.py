"""How much is read of output that nobody has read yet when the processes that wrote it have ended.

Ranks can write faster than output is read. What fails stands where reading had come to or in the
last lines, so of what is left beyond a limit the beginning and the end are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ncclops.record.events import OutputPassedOverEvent
from ncclops.record.run_directory import RunDirectory

# Read within some seconds: 10 to 45 MB/s (`PrintedReceipts` takes most of it), by how much of it
# looks like training. Ranks that are not in a flood are never so far ahead of the reader.
MOST_BYTES = 64 << 20

Span = tuple[int, int]  # of bytes: the first, and the one after the last


def gaps(unread: Mapping[Path, Span], most_bytes: int = MOST_BYTES) -> dict[Path, Span]:
    """What is not read of ``unread`` so that ``most_bytes`` in all are; nothing where they suffice.

    Small parts are read whole; of a larger one the gap lies in the middle.
    """
    found, left = dict[Path, Span](), most_bytes
    by_size = sorted(unread.items(), key=lambda item: item[1][1] - item[1][0])
    for done, (path, (begin, end)) in enumerate(by_size):
        share = min(end - begin, left // (len(by_size) - done))
        left -= share
        if share < end - begin:
            found[path] = begin + share // 2, end - (share - share // 2)
    return found


def tell(
    run: RunDirectory, say: Callable[[str], None], passed_over: Iterable[tuple[int, Path, Span]]
) -> None:
    """Record and say what was not read: of which rank, in which file, from where to where."""
    for rank, path, (begin, end) in passed_over:
        file = str(path.relative_to(run.path))
        run.add(OutputPassedOverEvent(rank=rank, file=file, begin=begin, end=end))
        say(
            f"rank {rank} wrote more than could be read: {(end - begin) >> 20:,} MiB in the middle"
            f" of {run.shown(path)} are not classified"
        )
