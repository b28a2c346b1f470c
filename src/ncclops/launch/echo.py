"""Shows workers' output on the terminal, whole lines only, each with its rank in front.

Workers write straight into their log files; this reads the files. So a terminal that is slow,
stopped or gone can hold up nobody but the thread below, and nothing is lost by it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ncclops.launch.tail import GrowthWatch, LineReader

# Six that can be told apart on dark and light backgrounds: red is left to errors.
_RANK_COLOURS = (36, 33, 35, 32, 34, 96)


@dataclass(frozen=True)
class Source:
    """One log file to show, and where: ``to_stderr`` keeps a worker's streams apart."""

    rank: int
    path: Path
    to_stderr: bool


class Echo:
    """Follows ``sources`` from :meth:`start` until :meth:`finish` has shown their last line."""

    def __init__(self, sources: Iterable[Source], *, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self._watch = GrowthWatch()
        self._feeds = [
            _Feed(
                LineReader(source.path), stream, _prefix(source.rank, stream), _plain(source.rank)
            )
            for source in sources
            for stream in [stderr if source.to_stderr else stdout]
        ]
        self._sources = [source.path for source in sources]
        self._notes: deque[str] = deque()
        self._stderr = stderr
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclops-echo", daemon=True)

    def start(self) -> None:
        for path in self._sources:
            self._watch.add(path)
        self._thread.start()

    def say(self, note: str) -> None:
        """Show a line of our own on stderr, between workers' lines; never blocks the caller."""
        self._notes.append(note)
        self._watch.wake()

    def finish(self) -> None:
        """Show what is left, then stop. Blocks as long as the terminal does."""
        self._finishing.set()
        self._watch.wake()
        self._thread.join()
        self._watch.close()

    def _run(self) -> None:
        try:
            while True:
                last_look = self._finishing.is_set()
                self._show_notes()
                grown = [feed.pump() for feed in self._feeds]
                if any(grown):
                    continue
                if last_look and not self._notes:
                    break
                self._watch.wait()
            for feed in self._feeds:
                feed.pump_rest()
        except OSError as error:
            # The terminal or the pipe's reader has gone. The run goes on: it is in the files.
            self._say_gone(error)
        finally:
            for feed in self._feeds:
                feed.reader.close()

    def _show_notes(self) -> None:
        while self._notes:
            self._stderr.write(f"ncclops: {self._notes.popleft()}\n".encode())
            self._stderr.flush()

    def _say_gone(self, error: OSError) -> None:
        try:
            sys.stderr.write(
                f"ncclops: output is no longer shown ({error.strerror}); see the logs\n"
            )
        except OSError:
            return


@dataclass
class _Feed:
    reader: LineReader
    stream: BinaryIO
    prefix: bytes
    own_prefix: bytes

    def pump(self) -> bool:
        """Show the lines that are there; whether anything was read."""
        lines = list(self.reader.read())
        self._show(lines)
        return bool(lines)

    def pump_rest(self) -> None:
        self._show([line + b"\n" for line in self.reader.rest()])

    def _show(self, lines: list[bytes]) -> None:
        # torch puts the rank in front of its tracebacks itself.
        bare = (line.removeprefix(self.own_prefix) for line in lines if line)
        if shown := b"".join(self.prefix + line for line in bare):
            self.stream.write(shown)
            self.stream.flush()


def _prefix(rank: int, stream: BinaryIO) -> bytes:
    if not wants_colour(stream):
        return _plain(rank)
    return f"\x1b[{_RANK_COLOURS[rank % len(_RANK_COLOURS)]}m[rank{rank}]:\x1b[0m ".encode()


def _plain(rank: int) -> bytes:
    return f"[rank{rank}]: ".encode()


def wants_colour(stream: BinaryIO) -> bool:
    """Whether to colour ``stream``, by the conventions ``NO_COLOR`` and ``FORCE_COLOR``."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
