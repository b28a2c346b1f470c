"""The launcher's standard input for one rank, for a debugger: ``--attach-stdin``.

A pipe or a file is handed to the rank as it is. With a terminal the rank gets one of its own, a
pseudo-terminal: so it edits lines with readline, as under ``python``, and what it writes goes into
its log file all the same, from which it is shown. Keys go there as they are typed, but for those
that send signals: Ctrl-C stops the run, as ever.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

_STDIN, _STDOUT = 0, 1
_CHUNK = 1 << 16
_LFLAG, _CC = tty.LFLAG, tty.CC


@dataclass(frozen=True)
class Streams:
    """A worker's standard input, and its output where that is not its log file."""

    stdin: int = subprocess.DEVNULL
    stdout: int | None = None


@contextmanager
def restored() -> Iterator[None]:
    """Leave the terminal as it was, whatever becomes of the agent."""
    before = _attributes()
    try:
        yield
    finally:
        if before is not None:
            with suppress(termios.error):
                termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


def _attributes() -> list[Any] | None:
    with suppress(termios.error):
        return termios.tcgetattr(_STDIN)
    return None


class Attached:
    """Standard input for a rank, whose output is appended to ``log``.

    From :meth:`open` on, and through all attempts, until :meth:`close`.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._file: FileIO | None = None
        self._master = self._slave = -1
        self._copying = threading.Lock()
        self._wake, self._waker = -1, -1
        self._thread = threading.Thread(target=self._run, name="ncclops-stdin", daemon=True)

    def open(self) -> Streams:
        """Begin; what the rank's process is to be started with."""
        before = _attributes()
        if before is None or not os.isatty(_STDOUT):
            return Streams(stdin=_STDIN)
        self._master, self._slave = os.openpty()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._master, False)
        self._take_terminal(before)
        self._thread.start()
        return Streams(stdin=self._slave, stdout=self._slave)

    def _take_terminal(self, before: list[Any]) -> None:
        """The rank's terminal echoes and edits instead of the launcher's, which has the signals."""
        ours, theirs = list(before), list(before)
        ours[_CC], theirs[_CC] = list(before[_CC]), list(before[_CC])
        ours[_LFLAG] &= ~(termios.ICANON | termios.ECHO)
        ours[_CC][termios.VMIN], ours[_CC][termios.VTIME] = 1, 0
        for attributes in (ours, theirs):  # workers would go on, and read what the shell is to get
            attributes[_CC][termios.VSUSP] = b"\0"
        theirs[tty.OFLAG] &= ~termios.OPOST  # the log file has plain lines
        termios.tcsetattr(self._slave, termios.TCSANOW, theirs)
        size = fcntl.ioctl(_STDOUT, termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0))
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, ours)

    def drain(self) -> None:
        """All that the rank has written is in its log when this returns."""
        if self._master >= 0:
            self._copy_output()

    def close(self) -> None:
        """End, once the rank has."""
        if self._master < 0:
            return
        os.close(self._waker)
        self._thread.join()
        self.drain()
        for fd in (self._master, self._slave, self._wake):
            os.close(fd)
        if self._file is not None:
            self._file.close()
        self._master = -1

    def _run(self) -> None:
        poller = select.poll()
        for fd in (_STDIN, self._master, self._wake):
            poller.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._wake in ready:
                return
            if self._master in ready:
                self._copy_output()
            if _STDIN in ready and not self._copy_input():
                poller.unregister(_STDIN)  # the terminal has gone

    def _copy_output(self) -> None:
        with self._copying, suppress(BlockingIOError):
            while chunk := os.read(self._master, _CHUNK):
                self._keep(chunk)

    def _keep(self, chunk: bytes) -> None:
        """What a full disk, or a directory that was removed, does not take is lost: the rank would
        wait for ever for somebody to read what it prints."""
        with suppress(OSError):
            if self._file is None:
                self._file = self._log.open("ab", buffering=0)
            self._file.write(chunk)

    def _copy_input(self) -> bool:
        try:
            typed = os.read(_STDIN, _CHUNK)
        except OSError:
            return False
        with suppress(BlockingIOError):  # nobody has read what was typed for long
            os.write(self._master, typed)
        return bool(typed)
