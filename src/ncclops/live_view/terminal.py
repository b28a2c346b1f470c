"""The terminal's modes and signals, and frames drawn over each other.

While a :class:`Terminal` is open, keys come one by one and unseen, frames are on the terminal's
other screen, and the signals that concern it wake the loop or end it. All of it is put back as it
was when it closes, whatever the reason.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from ncclops.live_view.lines import Line, encode

# The other screen; no cursor; lines that are too long stay in their row.
_ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = b"\x1b[?7h\x1b[?25h\x1b[m\x1b[?1049l"
# For a terminal that does not say.
_COLUMNS, _ROWS = 80, 24
# A terminal that takes nothing for so long keeps what it shows when we leave.
_TAKES_WITHIN_S = 0.5
_CHUNK = 4096


class Left(Exception):
    """Something has ended it: the signal ``signum``, or, where that is None, the terminal's end."""

    def __init__(self, signum: int | None = None) -> None:
        super().__init__(signum)
        self.signum = signum


def has_keys() -> bool:
    """Whether a person sits there: both streams are terminals, of a kind that can be drawn on."""
    streams = (sys.stdin, sys.stdout)  # None where it was closed
    is_capable = os.environ.get("TERM") not in (None, "", "dumb")
    return is_capable and all(stream is not None and stream.isatty() for stream in streams)


class Terminal:
    """See the module. For the main thread, and once."""

    def __init__(self, stdin: int, stdout: int, *, encoding: str) -> None:
        self._in, self._out, self._encoding = stdin, stdout, encoding
        self._colour = not os.environ.get("NO_COLOR")
        self._modes: list[object] = termios.tcgetattr(stdin)
        self._drawn: list[bytes] | None = None  # the rows that are there; None: not known
        self._suspend = self._resumed = False
        self._leaving = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        with suppress(OSError):
            columns, rows = os.get_terminal_size(self._out)
            return columns or _COLUMNS, rows or _ROWS
        return _COLUMNS, _ROWS

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The terminal is ours. Raises :class:`Left` from whatever is done meanwhile."""
        handlers = {
            signal.SIGWINCH: self._on_change,
            signal.SIGCONT: self._on_resume,
            signal.SIGTSTP: self._on_suspend,
            signal.SIGINT: self._on_leave,
            signal.SIGTERM: self._on_leave,
            signal.SIGHUP: self._on_leave,
        }
        before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
        woken = signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        try:
            self._enter()
            yield
            self._leaving = True
        finally:
            self._restore()
            signal.set_wakeup_fd(woken)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            os.close(self._wake_r)
            os.close(self._wake_w)

    def wake(self) -> None:
        """End a :meth:`wait`. Any thread may call this."""
        with suppress(OSError):  # full: it will wake all the same; closed: nobody waits
            os.write(self._wake_w, b"\0")

    def wait(self, also: Sequence[int], limit_s: float) -> bytes:
        """What was typed, as soon as something was, a file of ``also`` is readable, :meth:`wake`
        was called, a signal came or ``limit_s`` is over; empty in all cases but the first."""
        ready, _, _ = select.select([self._in, self._wake_r, *also], [], [], max(0.0, limit_s))
        if self._wake_r in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_r, _CHUNK)
        if self._suspend:
            self._sleep()
        if self._resumed:
            self._enter()
        return self._read() if self._in in ready else b""

    def draw(self, lines: Sequence[Line]) -> None:
        """Show ``lines``, one a row; rows that are as they were are not written again."""
        rows = [encode(line, colour=self._colour, encoding=self._encoding) for line in lines]
        known = self._drawn if self._drawn is not None and len(self._drawn) == len(rows) else None
        pieces = [b"\x1b[2J"] if known is None else []
        columns = self.size[0]
        for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
            if known is None or known[number] != row:
                # The last column is written, or what was there is cleared: not both.
                rest = b"" if line.columns >= columns else b"\x1b[K"
                pieces.append(b"\x1b[%d;1H%b%b" % (number + 1, row, rest))
        self._drawn = None  # until all of it is written
        self._write(b"".join(pieces))
        self._drawn = rows

    def forget(self) -> None:
        """Draw all rows anew the next time: something else may have written there."""
        self._drawn = None

    # --- modes ----------------------------------------------------------------------------------

    def _enter(self) -> None:
        # Ctrl-C and Ctrl-Z still send signals; from now on nothing is echoed.
        self._resumed = False
        tty.setcbreak(self._in, termios.TCSANOW)
        self._write(_ENTER)
        self.forget()

    def _restore(self) -> None:
        """Blocks for no terminal: one that is stopped (Ctrl-S) goes on, one that is gone is left.
        Keys that were typed meanwhile are not for the shell."""
        with suppress(OSError, termios.error):
            termios.tcflow(self._out, termios.TCOON)
            termios.tcflush(self._in, termios.TCIFLUSH)
        with suppress(OSError, ValueError):
            if select.select([], [self._out], [], _TAKES_WITHIN_S)[1]:
                os.write(self._out, _LEAVE)
        with suppress(OSError, termios.error):
            termios.tcsetattr(self._in, termios.TCSANOW, self._modes)  # type: ignore[arg-type]

    def _sleep(self) -> None:
        """Ctrl-Z: give the terminal back until the shell lets us go on."""
        self._suspend = False
        self._restore()
        mine = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # returns with SIGCONT
        signal.signal(signal.SIGTSTP, mine)
        # The shell may have other modes by now: those are put back in the end.
        self._modes = termios.tcgetattr(self._in)
        self._enter()

    def _read(self) -> bytes:
        try:
            typed = os.read(self._in, _CHUNK)
        except OSError:
            typed = b""
        if not typed:
            self._leaving = True
            raise Left  # the terminal is gone
        return typed

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._out, data[:_CHUNK]) :]
        except OSError as error:
            self._leaving = True
            raise Left from error

    # --- signals: in the main thread, between two instructions ------------------------------------

    def _on_change(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.forget()

    def _on_resume(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # After SIGSTOP, of which we know nothing before: a shell has had the terminal meanwhile.
        self._resumed = True

    def _on_suspend(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._suspend = True

    def _on_leave(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self._leaving:
            self._leaving = True
            # Also out of a write that a stopped terminal does not take.
            raise Left(signum)
