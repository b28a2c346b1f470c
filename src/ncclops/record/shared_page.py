"""A page of memory that two processes share, found by its path in the run directory.

The page itself lies in ``/dev/shm`` and the run directory holds a link to it. A page of a file
system with a disk (or a server) behind it would stall the writer, at times for seconds, when
the kernel writes it back; and the writer here is a training step. :func:`settle` turns the link
into an ordinary file with the same content, so that the record outlives the machine's memory.

A page holds the path of its link, and those who have made it hold a lock on it for as long as they
have it mapped: so :func:`sweep` finds the pages of runs that were killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ncclops.record.paths import RunPaths
from ncclops.record.regular_file import read_regular

SIZE_BYTES = 4096
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "ncclops-"
_PATH_AT = 1024  # what the page is about lies before this byte


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
        own_path = os.fsencode(path.absolute())
        if len(own_path) < SIZE_BYTES - _PATH_AT:  # else it cannot be swept
            page[_PATH_AT : _PATH_AT + len(own_path)] = own_path
    except OSError:  # no /dev/shm, or it is full or read-only
        with suppress(OSError):  # a read-only file system refuses that for what is not there, too
            target.unlink()
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
        content = read_regular(path, SIZE_BYTES)
    except OSError:
        return None
    return content if len(content) == SIZE_BYTES else None


def is_cut_short(path: Path) -> bool:
    """Whether something has truncated the page behind ``path``: its writer dies of SIGBUS then."""
    try:
        return path.stat().st_size < SIZE_BYTES
    except OSError:
        return False


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
        copy.unlink(missing_ok=True)
        with copy.open("xb") as file:  # never through a link that lies there
            file.write(read_regular(target, SIZE_BYTES))
        copy.replace(path)
    target.unlink(missing_ok=True)


def settle_all(run_dir: Path) -> None:
    """:func:`settle` every page of a run, once its workers have ended."""
    paths = RunPaths(run_dir)
    for rank in paths.rank_numbers():
        settle(paths.rank(rank).progress)
    settle(paths.stop_page)


def sweep(has_ended: Callable[[Path], bool]) -> list[Path]:
    """:func:`settle` the pages of this user that no process holds; the paths of their links.

    ``has_ended`` says of the path of a link whether its run has: while that goes on, it reads the
    pages of workers that have ended. A page whose run directory has moved or gone is freed.
    """
    swept = []
    for page, content in _unheld():
        path = Path(os.fsdecode(content[_PATH_AT:].rstrip(b"\0")))
        # One without a path is being made.
        with suppress(OSError):  # the server of its run directory has gone: the others are swept
            if path.is_absolute() and _freed(page, path, has_ended):
                swept.append(path)
    return swept


def _freed(page: Path, path: Path, has_ended: Callable[[Path], bool]) -> bool:
    if not path.is_symlink() or path.readlink() != page:
        page.unlink(missing_ok=True)
        return True
    if not has_ended(path):
        return False
    settle(path)
    return True


def _unheld() -> Iterator[tuple[Path, bytes]]:
    """The pages of this user that no process has mapped, with what they hold, under a lock."""
    uid = os.geteuid()
    for page in _SHARED_MEMORY.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            # Anybody may put anything there under this name.
            fd = os.open(page, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found = os.fstat(fd)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == uid
            if ours and found.st_size == SIZE_BYTES:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield page, os.pread(fd, SIZE_BYTES, 0)
        except OSError:  # it is held
            continue
        finally:
            os.close(fd)


def _map_new(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Allocated now: a page that finds no memory when it is first written ends the process
        # with SIGBUS.
        os.posix_fallocate(fd, 0, SIZE_BYTES)
        with suppress(OSError):  # a file system without locks, where nothing is swept either
            fcntl.flock(fd, fcntl.LOCK_SH)  # which the page keeps: it has a copy of the descriptor
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
