"""What a long run keeps of its incidents: a job may restart a thousand times in a month, and the
snapshots of one incident are up to some MB for each rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from ncclops.record.answer import Answer
from ncclops.record.events import SnapshotsRemovedEvent
from ncclops.record.paths import RunPaths, numbered
from ncclops.record.run_directory import RunDirectory
from ncclops.record.snapshot_files import MISSING, add_missing, rank_dir, ranks_in

# Where the first ones tell what is wrong with a job, and the last ones what it has ended with.
FIRST, LAST = 10, 50
REASON = f"removed: a run keeps the snapshots of its first {FIRST} and last {LAST} incidents"


def tidy(run: RunDirectory, say: Callable[[str], None]) -> None:
    """Remove what is too much, in a thread: a file system may hang. Says so once in a run."""
    Answer(partial(_tidy, run, say))


def _tidy(run: RunDirectory, say: Callable[[str], None]) -> None:
    for number in remove_old(run.paths):
        run.add(SnapshotsRemovedEvent(incident=number))
        if number == FIRST:
            say(f"from now on old snapshots are {REASON}; each incident.json stays")


def remove_old(paths: RunPaths) -> list[int]:
    """The incidents of which snapshots were removed now, in order; ``incident.json`` stays.

    A rank that has lost its snapshot says why in ``missing.json``.
    """
    removed = list[int]()
    for number in reversed(numbered(paths.incidents)[FIRST:-LAST]):
        if not _remove_snapshots(paths.incident(number)):
            break  # those before it have lost theirs, too
        removed.append(number)
    return removed[::-1]


def _remove_snapshots(incident: Path) -> bool:
    found = False
    for rank in ranks_in(incident):
        directory = rank_dir(incident, rank)
        with suppress(OSError):
            files = [] if directory.is_symlink() else _files(directory)
            if files:
                found = True
                with suppress(OSError):  # a full disk is a reason the more to remove them
                    add_missing(directory, REASON, [file.name for file in files])
            for file in files:
                file.unlink(missing_ok=True)
    return found


def _files(directory: Path) -> list[Path]:
    return [
        file
        for file in directory.iterdir()
        if file.name != MISSING and (file.is_symlink() or not file.is_dir())
    ]
