"""Appends records to a file from a thread of its own, so that a training step never does I/O."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

# At exit the file may be on a server that does not answer; the records are not worth more.
CLOSE_LIMIT = timedelta(seconds=5)
# How often the thread shows that the interpreter still runs. A heartbeat is the one thing that
# no event can announce.
TICK = timedelta(seconds=1)

Record = dict[str, Any]


class Writer:
    """Writes each record as one JSON line to ``fd``, in order, whole, as soon as it comes.

    ``tick`` is called about once a second from the writing thread: a thread holding the GIL for
    good silences it.
    """

    def __init__(self, fd: int, tick: Callable[[], None]) -> None:
        self._fd = fd
        self._tick = tick
        self._queue: queue.SimpleQueue[Record | threading.Event] = queue.SimpleQueue()
        self.put = self._queue.put  # safe in any thread and in signal handlers
        self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="ncclops-receipts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def flush(self, limit: timedelta = CLOSE_LIMIT) -> bool:
        """Wait until everything put so far is in the file; False if that takes too long."""
        written = threading.Event()
        self._queue.put(written)
        return written.wait(limit.total_seconds())

    def close(self) -> None:
        """Write what is left, within :data:`CLOSE_LIMIT`, and end the thread."""
        self._closing = True
        if self.flush():
            self._thread.join(CLOSE_LIMIT.total_seconds())
            os.close(self._fd)

    def _run(self) -> None:
        ticked = 0.0
        while not (self._closing and self._queue.empty()):
            batch = self._next_batch()
            self._write([item for item in batch if isinstance(item, dict)])
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()
            if time.monotonic() - ticked >= TICK.total_seconds():
                ticked = time.monotonic()
                self._tick()

    def _next_batch(self) -> list[Record | threading.Event]:
        batch: list[Record | threading.Event] = []
        with suppress(queue.Empty):
            batch.append(self._queue.get(timeout=TICK.total_seconds()))
            while True:
                batch.append(self._queue.get_nowait())
        return batch

    def _write(self, records: list[Record]) -> None:
        if not records or self._broken:
            return
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        remaining = lines.encode()
        try:
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
        except OSError as error:
            # Training goes on without a record rather than not at all, and says so once.
            self._broken = True
            sys.stderr.write(f"ncclops: receipts are no longer written: {error.strerror}\n")
