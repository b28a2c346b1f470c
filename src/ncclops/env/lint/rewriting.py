"""A file that is repaired: written whole or not at all, as it was in all but its text."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ncclops.errors import UsageError
from ncclops.record.regular_file import read_regular


def rewrite(name: str, before: bytes, after: bytes) -> None:
    """Have the file ``name`` hold ``after``, if it holds ``before``.

    A draft beside it takes its place, so that a crash leaves the old text or the new one. Mode,
    owner and extended attributes are kept; of a symbolic link the file that it leads to is
    written. Raises ``UsageError`` where that cannot be, or the file has changed, or has another
    hard link, which would keep the old text.
    """
    try:
        _rewrite(name, Path(name).resolve(strict=True), before, after)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name}: cannot be written: {why}; nothing more was repaired") from None


def _rewrite(name: str, path: Path, before: bytes, after: bytes) -> None:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if status.st_nlink > 1:
        raise UsageError(
            f"{name}: is not repaired: it has {status.st_nlink} hard links, and the others would"
            " keep the old text; --dry-run shows what to change; nothing more was repaired"
        )
    if not os.access(path, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    fd, draft = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(after)
            file.flush()
            _make_alike(fd, path, status)
            os.fsync(fd)
        now = os.lstat(path)
        same = (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino)
        if not same or now.st_size != len(before) or read_regular(path) != before:
            raise OSError(errno.ESTALE, "it has changed since it was read")
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the name, too, is on the disk
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _make_alike(fd: int, path: Path, status: os.stat_result) -> None:
    """Owner first: changing it takes bits of the mode away."""
    own = os.fstat(fd)
    if (own.st_uid, own.st_gid) != (status.st_uid, status.st_gid):
        os.fchown(fd, status.st_uid, status.st_gid)
    attributes = list[str]()
    with suppress(OSError):  # a file system without them
        attributes = os.listxattr(path)
    for name in attributes:
        try:
            os.setxattr(fd, name, os.getxattr(path, name))
        except OSError:
            if name.startswith("system."):  # who may read and write it
                raise
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
