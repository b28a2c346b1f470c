"""What takes longer to build than to read, kept in the user's cache directory from call to call.

A file there holds the bytes it was built from, the versions that built it, and the result; a result
is used where all of them are the same. The directory is read where it and the file belong to this
user and nobody else may write them, and nothing in it is executed. A cache that is damaged, absent,
foreign, full or not writable costs the time to build again and is no error. Any thread, and several
processes at once.
"""

from __future__ import annotations

import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ncclops._version import __version__

# Written into each file: another layout is another maker.
_MAKER = f"ncclops-cache/1 {__version__} {sys.implementation.cache_tag} {os.uname().machine}"
# The largest that we keep has 0.5 MB.
_MOST_BYTES = 32 << 20
# Of one kind: some versions side by side, and a site's own sets of signatures.
_MOST_FILES = 8


class Cache(NamedTuple):
    """Results by what they were built from; ``directory`` None keeps nothing."""

    directory: Path | None

    @classmethod
    def of_user(cls) -> Cache:
        """``$XDG_CACHE_HOME/ncclops``, by default ``~/.cache/ncclops``."""
        above = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not above.is_absolute():  # the specification has relative ones ignored
            try:
                above = Path.home() / ".cache"
            except RuntimeError:
                return NO_CACHE
        return cls(above / "ncclops") if above.is_absolute() else NO_CACHE

    def read(self, kind: str, source: bytes) -> bytes | None:
        """What ``write`` was given last for this source, or None."""
        if self.directory is None:
            return None
        expected = _head(kind, source)
        with suppress(OSError), _opened(self.directory) as folder:
            kept = _read_own(_name(kind, source), folder)
            whole, check = kept[:-4], kept[-4:]
            if whole.startswith(expected) and _check_of(whole) == check:
                return whole[len(expected) :]
        return None

    def write(self, kind: str, source: bytes, make: Callable[[], bytes]) -> None:
        """Keep what ``make`` returns if that can be done; older results of the kind make room."""
        if self.directory is None:
            return
        whole = _head(kind, source) + make()
        with suppress(OSError):
            _make(self.directory)
            with _opened(self.directory) as folder:
                _replace(_name(kind, source), whole + _check_of(whole), folder)
                _make_room(kind, folder)


NO_CACHE = Cache(None)


def _head(kind: str, source: bytes) -> bytes:
    return f"{_MAKER} {kind} {len(source)}\n".encode() + source


def _name(kind: str, source: bytes) -> str:
    # Sources of one name only take each other's place: whether it is this one, its bytes say.
    return f"{kind}-{zlib.crc32(_head(kind, source)):08x}"


def _check_of(whole: bytes) -> bytes:
    return zlib.crc32(whole).to_bytes(4, "big")


def _make(directory: Path) -> None:
    for path in (directory.parent, directory):
        if not path.exists():
            # Root in another user's home would make what that user could not use.
            if path.parent.stat().st_uid != os.geteuid():
                raise PermissionError
            path.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A descriptor of the directory; raises ``OSError``, also where others may write in it."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _require_own(os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def _read_own(name: str, folder: int) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        status = os.fstat(file.fileno())
        _require_own(status)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise PermissionError
        return file.read(_MOST_BYTES)


def _require_own(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError


def _replace(name: str, data: bytes, folder: int) -> None:
    """Write a file whole or not at all, as a reader sees it."""
    new = f"{name}.{os.urandom(6).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise


def _make_room(kind: str, folder: int) -> None:
    # What a killed process left half written goes the same way.
    ages = {
        name: os.stat(name, dir_fd=folder).st_mtime_ns
        for name in os.listdir(folder)
        if name.startswith(f"{kind}-")
    }
    for name in sorted(ages, key=lambda each: ages[each], reverse=True)[_MOST_FILES:]:
        os.unlink(name, dir_fd=folder)
