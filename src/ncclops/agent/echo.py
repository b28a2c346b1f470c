"""Shows workers' output on the terminal, whole lines only, each with its rank in front.

Workers write straight into their log files; this reads the files. So a terminal that is slow,
stopped or gone holds up only the thread below, and nothing is lost by it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ncclops.agent.screen import Screen
from ncclops.plain_text import plain
from ncclops.record.regular_file import open_regular
from ncclops.record.tail import GrowthWatch, LineReader

Read = TypeVar("Read")

_CHUNK = 1 << 16
# Of one file, once the run has ended: more takes minutes, and nobody reads it.
_LEFT_BYTES = 64 << 20
_UP = b"\x1b[A"
# For so long nothing else was shown before a line of our own stands below it.
_QUIET_S = 0.9
# Six that can be distinguished on dark and light backgrounds: red is left to errors.
_RANK_COLOURS = (36, 33, 35, 32, 34, 96)


@dataclass(frozen=True)
class Source:
    """One log file to show, and where: ``to_stderr`` keeps a worker's streams apart.

    ``from_end``: what it holds already is not shown. ``as_is``: it is shown as it is written, for
    a rank that has a terminal.
    """

    rank: int
    path: Path
    to_stderr: bool
    from_end: bool = False
    as_is: bool = False


class Echo:
    """Follows sources from :meth:`start` until :meth:`finish` has shown their last line."""

    def __init__(self, screen: Screen) -> None:
        self._watch = GrowthWatch()
        self._screen = screen
        self._sources: dict[Source, tuple[int, int]] = {}  # which file each one was
        self._new: deque[_Feed | _PlainFeed] = deque()
        self._feeds: list[_Feed | _PlainFeed] = []  # the thread's own
        self._notes: deque[str] = deque()
        self._own: str | None = None
        self._shown_at = 0.0  # when something else was shown last, of the monotonic clock
        self._held = False
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclops-echo", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, sources: Iterable[Source]) -> None:
        """Show these too; a source that is followed already stays so, unless its file was renamed
        or removed (as logs are rotated), and there is another one.

        Not one that is not there: the script may have removed its directory.
        """
        for source in sources:
            with suppress(OSError):
                status = source.path.stat()
                file = (status.st_dev, status.st_ino)
                if self._sources.get(source) != file:
                    kind = _PlainFeed if source.as_is else _Feed
                    self._new.append(kind(source, self._screen))
                    self._watch.add(source.path)
                    self._sources[source] = file
        self._watch.wake()

    def say(self, note: str) -> None:
        """Show a line of our own on stderr, between workers' lines; never blocks the caller."""
        self._notes.append(note)
        self._watch.wake()

    def progress(self, text: str | None) -> None:
        """Have ``text`` stand at the bottom of a terminal while nothing else is shown there, and no
        worker draws a bar of its own; None: nothing. To be called again now and then."""
        if text is not None or self._own is not None:
            self._own = text
            self._watch.wake()

    def hold(self, held: bool) -> None:
        """Show nothing from the next look at the files on, not even at the end, while ``held``."""
        self._held = held
        self._watch.wake()

    def finish(self) -> None:
        """Show what is left, the last 64 MiB of a file at most, then stop.

        Blocks as long as the terminal does, or is held.
        """
        self._finishing.set()
        self._watch.wake()
        self._thread.join()
        self._watch.close()

    def _run(self) -> None:
        last_look = False
        while True:
            if self._held:
                self._watch.wait()
                continue
            while self._new:
                self._feeds.append(self._new.popleft())
            if not last_look and self._finishing.is_set():
                last_look = True
                for feed in self._feeds:
                    self._tell_left_out(feed.source, _read(feed.pass_over, 0))
            while self._notes:
                self._write_note(self._notes.popleft())
            grown = [_read(feed.pump, False) for feed in self._feeds]
            if any(grown):
                self._shown_at = time.monotonic()
                continue
            self._show_own()
            if last_look and not (self._notes or self._new):
                break
            self._watch.wait()
        self._screen.show_own(None)
        for feed in self._feeds:
            feed.finish()

    def _show_own(self) -> None:
        text = self._own
        if time.monotonic() - self._shown_at < _QUIET_S:
            return  # where lines follow each other, one more would flicker
        self._screen.show_own(None if text is None else f"ncclops: {plain(text)}".encode())

    def _tell_left_out(self, source: Source, left_out: int) -> None:
        if left_out:
            name = source.path.name
            self._write_note(
                f"rank {source.rank}: {left_out >> 20:,} MiB of {name} are not shown here"
                f" (they are in {source.path})"
            )

    def _write_note(self, note: str) -> None:
        self._shown_at = time.monotonic()
        self._screen.write(f"ncclops: {plain(note)}\n".encode(), to_stderr=True)


class _Feed:
    """One file on its way to the screen."""

    def __init__(self, source: Source, screen: Screen) -> None:
        self.source = source
        self._reader = LineReader(source.path, from_end=source.from_end)
        self._screen = screen
        self._prefix = f"[rank{source.rank}]: ".encode()
        # torch puts the rank in front of its tracebacks itself, the restart core of what it logs.
        rank = source.rank
        self._own_prefix = re.compile(rb"^(?:\[rank%d\]: |\[rank %d\] )" % (rank, rank))
        if screen.wants_colour(source.to_stderr):
            colour = _RANK_COLOURS[source.rank % len(_RANK_COLOURS)]
            self._prefix = f"\x1b[{colour}m[rank{source.rank}]:\x1b[0m ".encode()

    def pump(self) -> bool:
        """Show the lines that are there; whether anything was read."""
        lines = list(self._reader.read())
        self._show([line for line in lines if line])
        if progress := _last_segment(self._reader.partial):
            self._screen.show_progress(self._prefix, progress, to_stderr=self.source.to_stderr)
        return bool(lines)

    def pass_over(self) -> int:
        """Leave out all but the last part of what is to be shown; how many bytes that is."""
        return self._reader.pass_over(_LEFT_BYTES)

    def finish(self) -> None:
        self._show([line + b"\n" for line in self._reader.rest()])
        self._reader.close()

    def _show(self, lines: list[bytes]) -> None:
        if self._screen.is_terminal(self.source.to_stderr):
            # The bar's last state stands for all of its states.
            lines = [
                (_last_segment(line) or line.rstrip()) + b"\n"
                for line in lines
                if not _is_passing(line)
            ]
        shown = b"".join(self._prefix + self._own_prefix.sub(b"", line, count=1) for line in lines)
        if shown:
            self._screen.write(shown, to_stderr=self.source.to_stderr)


class _PlainFeed:
    """One file on its way to the screen, as it is."""

    def __init__(self, source: Source, screen: Screen) -> None:
        self.source = source
        self._file = open_regular(source.path)
        self._screen = screen

    def pump(self) -> bool:
        """Show what is there; whether anything was read."""
        chunk = self._file.read(_CHUNK)
        if chunk:
            self._screen.write_as_is(chunk)
        return bool(chunk)

    def pass_over(self) -> int:
        """Leave out all but the last part of what is to be shown; how many bytes that is."""
        at, size = self._file.tell(), os.fstat(self._file.fileno()).st_size
        left_out = max(0, size - at - _LEFT_BYTES)
        self._file.seek(left_out, os.SEEK_CUR)
        return left_out

    def finish(self) -> None:
        self._screen.end_line()
        self._file.close()


def _read(look: Callable[[], Read], otherwise: Read) -> Read:
    """What ``look`` returns; ``otherwise`` where the file system of the output gives errors: what
    ncclops itself has to say is shown all the same."""
    try:
        return look()
    except OSError:
        return otherwise


def _is_passing(line: bytes) -> bool:
    """Whether it is the state of a bar below another one, which goes back up to that: the newline
    is how the next state comes down again, thousands of times."""
    return b"\r" in line and line.rstrip(b"\r\n").endswith(_UP)


def _last_segment(line: bytes) -> bytes:
    """The newest state of a progress bar, which redraws itself after each carriage return.

    Empty for a line that has none.
    """
    *earlier, last = line.rstrip(b"\r\n").split(b"\r")
    if not earlier:
        return b""
    return last or earlier[-1]
