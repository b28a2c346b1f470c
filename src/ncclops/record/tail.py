"""Follows growing files line by line, woken by the kernel instead of a timer."""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ncclops.record.regular_file import WithoutHoles, open_regular

_IN_MODIFY, _IN_MOVE_SELF = 0x2, 0x800
# A line longer than this is handed on in pieces, so that output without a newline (binary
# garbage, an endless progress bar) cannot fill the memory.
_LONGEST_LINE = 16 << 20
_CHUNK = 1 << 18
_PEEK = 4096
# A timer, only where inotify is not to be had (the limits on instances and on watches are a user's,
# and editors and containers share them): there is no other event for "this file has grown".
_LOOK_EVERY_NS = 100_000_000
_CLOCK_MONOTONIC = 1


class LineReader:
    """Yields each line of a growing file once, or with ``from_end`` each that is new from now on.

    One reader, one thread. Raises ``OSError`` where ``path`` is not there, or no regular file.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._file = WithoutHoles(open_regular(path))
        if from_end:
            self._file.seek(0, os.SEEK_END)
        self._partial: list[bytes] = []
        self._partial_bytes = 0

    def read(self) -> Iterator[bytes]:
        """The lines that are complete now, each with its newline, at most a few hundred kB of them.

        Yields nothing when nothing is new; call again until then.
        """
        chunk = self._file.read(_CHUNK)
        if not chunk:
            return
        first, newline, rest = chunk.partition(b"\n")
        self._partial.append(first + newline)
        self._partial_bytes += len(first) + len(newline)
        if newline:
            yield from self.rest()
            *lines, tail = rest.split(b"\n")
            yield from (line + b"\n" for line in lines)
            if tail:
                self._partial, self._partial_bytes = [tail], len(tail)
        elif self._partial_bytes > _LONGEST_LINE:
            yield from self.rest()
        else:
            yield b""  # something was read, and no line is complete yet

    def pass_over(self, keep_bytes: int) -> int:
        """Read on ``keep_bytes`` before the end, at the next line; how many bytes are left out.

        None are where there is less to read.
        """
        at, end = self._file.tell(), os.fstat(self._file.fileno()).st_size
        if end - at <= keep_bytes:
            return 0
        begin = end - keep_bytes
        self._file.seek(begin)
        begin += (self._file.read(_CHUNK) or b"").find(b"\n") + 1
        self._file.seek(begin)
        self._partial, self._partial_bytes = [], 0
        return begin - at

    @property
    def partial(self) -> bytes:
        """The end of what stands after the last newline, a few kB at most; not counted as read."""
        return b"".join(self._partial[-2:])[-_PEEK:]

    def rest(self) -> Iterator[bytes]:
        """What has been read after the last newline, if anything; it counts as read."""
        if self._partial:
            yield b"".join(self._partial)
            self._partial, self._partial_bytes = [], 0

    def reads(self, path: Path) -> bool:
        """Whether ``path`` is still the file that is read here. Raises ``OSError``."""
        return os.path.samestat(os.fstat(self._file.fileno()), path.stat())

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of ``path`` as it is now. Raises ``OSError``, as ``LineReader``."""
    reader = LineReader(path)
    try:
        while lines := list(reader.read()):
            yield from filter(None, lines)
        yield from reader.rest()
    finally:
        reader.close()


class GrowthWatch:
    """Blocks until one of some files has grown, or until another thread calls :meth:`wake`.

    Where the kernel cannot watch them all, ten times a second they are taken to have grown.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._timer = -1
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        self._poller = select.epoll()
        self._poller.register(self._waker, select.EPOLLIN)
        if self._inotify >= 0:
            self._poller.register(self._inotify, select.EPOLLIN)
        else:
            self._start_timer()

    def fileno(self) -> int:
        """Readable when :meth:`wait` would return at once, for use in an event loop."""
        return self._poller.fileno()

    def add(self, path: Path, *, moves: bool = False) -> None:
        """Watch ``path``, which must exist; with ``moves`` for being moved, instead of growth."""
        if self._inotify >= 0:
            event = _IN_MOVE_SELF if moves else _IN_MODIFY
            watch = self._libc.inotify_add_watch(self._inotify, os.fsencode(path), event)
            if watch < 0:
                self._give_up_inotify()

    def _give_up_inotify(self) -> None:
        self._poller.unregister(self._inotify)
        os.close(self._inotify)
        self._inotify = -1
        self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        times = (ctypes.c_long * 4)(0, _LOOK_EVERY_NS, 0, _LOOK_EVERY_NS)  # struct itimerspec
        if self._timer < 0 or self._libc.timerfd_settime(self._timer, 0, times, None) < 0:
            raise OSError(ctypes.get_errno(), f"timerfd: {os.strerror(ctypes.get_errno())}")
        self._poller.register(self._timer, select.EPOLLIN)

    def wait(self) -> None:
        """Return when a file has grown since the last call, or after :meth:`wake`."""
        for fd, _ in self._poller.poll():
            with suppress(BlockingIOError):
                os.read(fd, 1 << 16)

    def wake(self) -> None:
        """End a :meth:`wait`, the current one or the next; after :meth:`close`, nothing.

        Any thread may call this.
        """
        with self._closing:  # the number of a closed descriptor may be another file's by now
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        self._poller.close()
        with self._closing:
            os.close(self._waker)
            self._waker = -1
        for fd in (self._inotify, self._timer):
            if fd >= 0:
                os.close(fd)


def last_lines(path: Path, count: int, limit_bytes: int = 64 << 10) -> list[str]:
    """The last ``count`` lines of ``path``, looking no further back than ``limit_bytes``."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]
