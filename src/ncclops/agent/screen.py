"""The terminal's two streams, for one thread: whole lines, and progress bars in place."""

from __future__ import annotations

import os
from typing import BinaryIO

from ncclops.agent.bar_text import fitted

_COLUMNS = 80  # for a terminal that does not say
_CLEAR_LINE = b"\r\x1b[K"


class Screen:
    """stdout and stderr of the launcher. A stream whose reader has gone is no longer written to."""

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self._streams = {False: stdout, True: stderr}
        self._gone: set[bool] = set()
        self._progress: tuple[bool, bytes] | None = None  # what stands unfinished on the terminal
        self._is_own = False  # and it is no worker's
        self._in_line = False  # something as it is, such as a prompt, has not ended its line

    def is_terminal(self, to_stderr: bool) -> bool:
        return self._streams[to_stderr].isatty()

    def wants_colour(self, to_stderr: bool) -> bool:
        """Whether to colour a stream, by the conventions ``NO_COLOR`` and ``FORCE_COLOR``."""
        if os.environ.get("NO_COLOR"):
            return False
        return bool(os.environ.get("FORCE_COLOR")) or self.is_terminal(to_stderr)

    def write(self, text: bytes, *, to_stderr: bool) -> None:
        """Write whole lines."""
        self.end_line()
        self._write(text, to_stderr)

    def write_as_is(self, text: bytes) -> None:
        """Write on stdout what need not end with a line."""
        self._clear_progress()
        self._write(text, to_stderr=False)
        self._in_line = not text.endswith(b"\n")

    def end_line(self) -> None:
        """What is written next begins a line."""
        self._clear_progress()
        if self._in_line:
            self._write(b"\n", to_stderr=False)
            self._in_line = False

    def show_progress(self, prefix: bytes, text: bytes, *, to_stderr: bool) -> None:
        """Replace the unfinished line at the bottom of a terminal; nothing happens elsewhere."""
        shown = (to_stderr, prefix + text)
        if not self.is_terminal(to_stderr) or shown == self._progress or self._in_line:
            return
        self._clear_progress()
        columns = os.get_terminal_size(self._streams[to_stderr].fileno()).columns
        self._write(fitted(prefix + text, (columns or _COLUMNS) - 1), to_stderr)
        self._progress = shown

    def show_own(self, text: bytes | None) -> None:
        """The same for a line of our own on stderr, where no worker's bar is in its place; None: it
        goes."""
        if self._progress is not None and not self._is_own:
            return
        if text is None:
            self._clear_progress()
        else:
            self.show_progress(b"", text, to_stderr=True)
            self._is_own = self._progress is not None

    def _clear_progress(self) -> None:
        if self._progress is not None:
            self._write(_CLEAR_LINE, self._progress[0])
            self._progress, self._is_own = None, False

    def _write(self, text: bytes, to_stderr: bool) -> None:
        if to_stderr in self._gone:
            return
        stream = self._streams[to_stderr]
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            # A closed terminal, a `| head` that has seen enough. The run goes on in its files.
            self._gone.add(to_stderr)
            note = f"ncclops: output is no longer shown here ({error.strerror}); see the logs\n"
            self._write(note.encode(), not to_stderr)
