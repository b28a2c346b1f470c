"""A command of ours on a terminal of its own, and what that shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.conftest import LIMIT_S, clean_environ

_SEQUENCE = re.compile(rb"\x1b\[(?P<arguments>[?0-9;]*)(?P<letter>[A-Za-z])|(?P<text>[^\x1b]+)")


class OnTerminal:
    """``ncclops`` with the arguments ``command``; or ``bash`` with its own, to type one into.

    ``rows`` are as the frames of `status --watch` draw them, on the other screen; ``other`` tells
    whether that is shown. ``said`` is what is written on the first one, without sequences.
    """

    def __init__(
        self,
        directory: Path,
        *command: str,
        columns: int = 80,
        rows: int = 24,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.rows: dict[int, str] = {}
        self.other = False
        self.said = b""
        self._row = 1
        self._unread = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(directory)
            ours = [sys.executable, "-m", "ncclops"]
            argv = list(command) if command[0] == "bash" else [*ours, *command]
            wanted = {"TERM": "xterm", "LANG": "C.UTF-8", "PS1": "$ ", **(environ or {})}
            os.execvpe(argv[0], argv, clean_environ(wanted))
        self.resize(columns, rows)

    @property
    def text(self) -> str:
        """What is on the other screen."""
        return "\n".join(self.rows.get(row, "") for row in range(1, 1 + max(self.rows, default=0)))

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def echoes(self) -> bool:
        """Whether what is typed is shown, and lines are whole: the modes of a shell's command."""
        wanted = termios.ECHO | termios.ICANON
        return bool(termios.tcgetattr(self._fd)[3] & wanted == wanted)

    def until(self, holds: Callable[[OnTerminal], object], what: str = "") -> None:
        """Read what is shown until ``holds``."""
        deadline = time.monotonic() + LIMIT_S
        while not holds(self):
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{what}: not in\n{self.text}\n{self.said[-2000:]!r}"
            if select.select([self._fd], [], [], min(left_s, 1.0))[0]:
                self._take(os.read(self._fd, 1 << 16))

    def until_shown(self, *texts: str) -> None:
        self.until(lambda seen: seen.other and all(text in seen.text for text in texts), str(texts))

    def ended(self) -> int:
        """How it has ended: its exit code, or -1 times the signal."""
        while True:
            try:
                if not (shown := os.read(self._fd, 1 << 16)):
                    break
            except OSError:  # nobody has it open any more
                break
            self._take(shown)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def hang_up(self) -> None:
        """The terminal is closed, as by a lost connection."""
        os.close(self._fd)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)
        os.waitpid(self.pid, 0)

    def _take(self, shown: bytes) -> None:
        data, self._unread = self._unread + shown, b""
        at = 0
        while at < len(data):
            found = _SEQUENCE.match(data, at)
            if found is None or (found["text"] and found.end() == len(data) and _is_cut(found)):
                self._unread = data[at:]
                return
            at = found.end()
            if found["text"]:
                self._write(found["text"])
            else:
                self._act(found["arguments"], found["letter"])

    def _write(self, text: bytes) -> None:
        if self.other:
            self.rows[self._row] = self.rows.get(self._row, "") + text.decode()
        else:
            self.said += text

    def _act(self, arguments: bytes, letter: bytes) -> None:
        if arguments == b"?1049":
            self.other, self.rows = letter == b"h", {}
        elif letter == b"J":
            self.rows = {}
        elif letter == b"H" and self.other:
            self._row = int(arguments.partition(b";")[0])
            self.rows[self._row] = ""


def _is_cut(found: re.Match[bytes]) -> bool:
    """Whether the text ends within a character."""
    try:
        found["text"].decode()
    except UnicodeDecodeError:
        return True
    return False
