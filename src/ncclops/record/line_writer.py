"""Appends lines to a file in a thread of its own: no disk holds up who has something to record."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ncclops.record.regular_file import append_regular

# A disk that does not take them for so long may lose some: the memory is the training's.
_MOST_WAITING = 20_000


class LineWriter:
    """Writes what :meth:`add` is given into ``path``, in order, each in one write.

    ``failed`` is called in that thread with the error of a write; that line is lost. ``dropped``
    counts lost lines: those, and what came while :data:`_MOST_WAITING` were waiting. Any thread may
    add; the thread starts with the first line.
    """

    def __init__(self, path: Path, failed: Callable[[OSError], None]) -> None:
        self._path = path
        self._failed = failed
        self._waiting: queue.Queue[bytes | threading.Event] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="ncclops-record", daemon=True)
        self._starting = threading.Lock()
        self.dropped = 0

    def add(self, line: bytes) -> None:
        """Have ``line`` written soon."""
        self._put(line)

    def flush(self, limit_s: float) -> bool:
        """Wait until what was added before is written; False if that takes longer."""
        written, until = threading.Event(), time.monotonic() + limit_s
        return self._put(written) and written.wait(max(0.0, until - time.monotonic()))

    def _put(self, item: bytes | threading.Event) -> bool:
        if not self._has_started():
            self._do(item)
            return True
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self.dropped += isinstance(item, bytes)
            return False
        return True

    def _has_started(self) -> bool:
        with self._starting:
            if not self._thread.is_alive():
                try:
                    self._thread.start()
                except RuntimeError:  # as many threads as are allowed: without one, then
                    return False
        return True

    def _run(self) -> None:
        while True:
            self._do(self._waiting.get())

    def _do(self, item: bytes | threading.Event) -> None:
        if isinstance(item, threading.Event):
            item.set()
            return
        try:
            append(self._path, item)
        except OSError as error:
            self.dropped += 1
            self._failed(error)


def append(path: Path, line: bytes) -> None:
    """Append ``line`` in one unbuffered write, so that no kill can leave half of it.

    Raises ``OSError``.
    """
    with append_regular(path) as file:
        file.write(line)
