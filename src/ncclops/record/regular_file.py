"""Files that a worker may have written, or replaced: read if they are what they should be.

In place of a file there may be a pipe on which a reader waits for ever, a link to ``/dev/zero``, or
80 GB. Standard library only, for the monitor process.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# The largest documents describe 2,000 process groups, in some MB.
MOST_BYTES = 64 << 20


def open_regular(path: Path, *, follow: bool = True) -> io.FileIO:
    """``path`` for reading, unbuffered. Raises ``OSError``, also where it is no regular file.

    ``follow``: a link at the end of ``path`` may lead to it.
    """
    # O_NONBLOCK: a pipe without a writer, or a device, is opened at once.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    return _checked(os.open(path, flags), path, "rb")


class WithoutHoles(io.RawIOBase):
    """A regular file, read without the zeros of its holes: one byte of zero stands for each.

    A log that was truncated beyond its end, or emptied while a process wrote on, has terabytes of
    them on no block of the disk. Closes ``file`` when it is closed.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: WriteableBuffer) -> int:
        """As of a file; after a hole first the one zero alone."""
        at = self._file.tell()
        begin = self._next_data(at)
        self._file.seek(begin)
        if begin == at:
            return self._file.readinto(buffer) or 0
        memoryview(buffer).cast("B")[:1] = b"\0"
        return 1

    def _next_data(self, at: int) -> int:
        """Where data begins at ``at`` or behind it; the end where there is a hole up to it."""
        # Before the look for data: what is written after both is no part of a hole.
        end = os.fstat(self._file.fileno()).st_size
        try:
            return os.lseek(self._file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # a file system that does not know its holes
                return at
            return max(at, end)

    def close(self) -> None:
        if not self.closed:
            with suppress(OSError):  # of a file system that has failed: nothing is lost with it
                self._file.close()
        super().close()


def is_there(path: Path) -> bool:
    """Whether something is at ``path``; False also where its file system gives errors, for which
    ``Path.exists`` raises them."""
    return os.path.exists(path)  # noqa: PTH110


def can_be_quoted(path: str) -> bool:
    """Whether the source file at ``path`` can be read by ``linecache``, which reads whatever is
    there to its end; also where nothing is, as it knows sources without a file."""
    try:
        found = os.stat(path)  # noqa: PTH116 - names of code objects are no paths, as a rule
    except (OSError, ValueError):
        return True
    return stat.S_ISREG(found.st_mode) and found.st_size <= MOST_BYTES


def append_regular(path: Path) -> io.FileIO:
    """``path`` for appending, unbuffered; made if it is not there. Raises ``OSError``, as above."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe that nobody reads
            raise
        raise _no_file(errno.EINVAL, path) from error
    return _checked(fd, path, "ab")


def write_named(path: Path, content: bytes) -> None:
    """``content`` into ``path``, which its user has named: a file, a device, a pipe with a reader.

    Raises ``OSError``, also where nobody reads the pipe: opened in the usual way, it would wait
    for a reader for ever.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO or not path.is_fifo():
            raise
        raise OSError(errno.ENXIO, "it is a pipe that nobody reads", str(path)) from error
    with os.fdopen(fd, "wb") as file:
        os.set_blocking(fd, True)
        file.write(content)


def advice(error: OSError) -> str:
    """What to do about a file that was handed over and is none, or too large; nothing else."""
    if error.errno == errno.EINVAL:
        return "; pipe it into the command, and write - for it"
    return "; hand over the part that matters" if error.errno == errno.EFBIG else ""


def read_stdin(most_bytes: int) -> bytes:
    """All of standard input. Raises ``OSError``, also where it is larger."""
    with open(0, "rb", closefd=False) as stdin:
        return _all_of(stdin, most_bytes, "standard input")


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """What the regular file holds. Raises ``OSError``, also where it is larger."""
    with open_regular(path) as file:
        return _all_of(file, most_bytes, str(path))


def _all_of(file: IO[bytes], most_bytes: int, name: str) -> bytes:
    # Not by its size alone: it may grow meanwhile.
    parts, left = [], most_bytes + 1
    while left > 0 and (part := file.read(min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    if left <= 0:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", name)
    return b"".join(parts)


def _checked(fd: int, path: Path, mode_of_file: str) -> io.FileIO:
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise _no_file(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, path)
    os.set_blocking(fd, True)  # for a process that is given it
    return io.FileIO(fd, mode_of_file)


def _no_file(code: int, path: Path) -> OSError:
    what = os.strerror(code) if code == errno.EISDIR else "it is no regular file"
    return OSError(code, what, str(path))
