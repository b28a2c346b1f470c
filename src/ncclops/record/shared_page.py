"""A page of memory that two processes share, found by its path in the run directory.

The page itself lies in ``/dev/shm`` and the run directory holds a link to it. A page of a file
system with a disk (or a server) behind it would stall the writer, at times for seconds, when
the kernel writes it back; and the writer here is a training step. :func:`settle` turns the link
into an ordinary file with the same content, so that the record outlives the machine's memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

from ncclops.record.paths import RunPaths

SIZE_BYTES = 4096
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "ncclops-"


def create(path: Path) -> mmap.mmap:
    """A fresh page of zeros behind ``path``, replacing whatever was there.

    Falls back to an ordinary file where there is no shared memory to be had. Raises ``OSError``
    where neither can be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    settle(path)
    target = _SHARED_MEMORY / f"{_PREFIX}{os.getuid()}-{secrets.token_hex(8)}"
    try:
        page = _map_new(target)
    except OSError:  # no /dev/shm, or it is full
        target.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        return _map_new(path)
    link = path.with_name(f"{path.name}.{target.name}")
    link.symlink_to(target)
    link.replace(path)  # a reader finds the old page or the new one, never nothing
    return page


def attach(path: Path) -> mmap.mmap:
    """The page behind ``path``, for reading and writing. Raises ``OSError`` if there is none."""
    return _map(path, os.O_RDWR)


def read(path: Path) -> bytes | None:
    """What the page behind ``path`` holds now; None if there is none."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content if len(content) == SIZE_BYTES else None


def settle(path: Path) -> None:
    """Replace the link at ``path`` by a file with the page's content and free the page.

    Does nothing if ``path`` is no such link. Those who have the page mapped keep their view.
    """
    try:
        target = path.readlink()
    except OSError:  # not there, or an ordinary file already
        return
    if target.parent != _SHARED_MEMORY or not target.name.startswith(_PREFIX):
        return
    with suppress(OSError):  # a full disk, or a page that a reboot has taken: there is no more
        copy = path.with_name(f"{path.name}.settled")
        copy.write_bytes(target.read_bytes())
        copy.replace(path)
    target.unlink(missing_ok=True)


def settle_all(run_dir: Path) -> None:
    """:func:`settle` every page of a run, once its workers have ended."""
    paths = RunPaths(run_dir)
    for rank in paths.rank_numbers():
        settle(paths.rank(rank).progress)
    settle(paths.stop_page)


def _map_new(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Allocated now: a page that finds no memory when it is first written ends the process
        # with SIGBUS.
        os.posix_fallocate(fd, 0, SIZE_BYTES)
        return mmap.mmap(fd, SIZE_BYTES)
    finally:
        os.close(fd)


def _map(path: Path, flags: int) -> mmap.mmap:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != SIZE_BYTES:
            raise OSError(f"{path} is not a page of {SIZE_BYTES} bytes")
        return mmap.mmap(fd, SIZE_BYTES)
    finally:
        os.close(fd)
