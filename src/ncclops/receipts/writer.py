"""Appends records to a file from a separate thread, so that a training step never does I/O."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# At exit the file may be on a server that does not answer; the records are not worth a longer wait.
CLOSE_LIMIT = timedelta(seconds=5)
# How often the thread shows that the interpreter still runs. A heartbeat is the one thing that
# no event can announce.
TICK = timedelta(seconds=1)
# Steps are written in batches, this often: waking a thread for each step would cost ten times as
# much as noting it. A record that must be seen at once wakes the thread.
BATCH = timedelta(milliseconds=250)

Record = dict[str, Any]


class Writer:
    """Writes each record as one JSON line to ``fd``, in order, whole.

    ``tick`` is called about once a second from the writing thread: a thread that keeps the GIL
    silences it.
    """

    def __init__(self, fd: int, tick: Callable[[], None]) -> None:
        self._fd = fd
        self._file = _identity(fd)
        self._tick = tick
        self._clock = time.monotonic  # kept, as a script may put another one in the module
        self._waiting: deque[Record | threading.Event] = deque()
        # Takes a record; safe in any thread and in signal handlers. It is in the file within BATCH.
        self.put = self._waiting.append
        self._awake = threading.Event()
        self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="ncclops-receipts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put_now(self, record: Record) -> None:
        """Take a record and write it at once, with everything before it."""
        self.put(record)
        self._awake.set()

    def flush(self, limit: timedelta = CLOSE_LIMIT) -> bool:
        """Wait until everything put so far is in the file; False if that takes too long."""
        written = threading.Event()
        self.put(written)
        self._awake.set()
        return written.wait(limit.total_seconds())

    def close(self) -> None:
        """Write what is left, within :data:`CLOSE_LIMIT`, and end the thread."""
        self._closing = True
        if self.flush():
            self._thread.join(CLOSE_LIMIT.total_seconds())
            if self._is_open():
                os.close(self._fd)

    def _run(self) -> None:
        clock = self._clock
        ticked = clock()
        while not (self._closing and not self._waiting):
            self._awake.wait(BATCH.total_seconds())
            self._awake.clear()
            batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._write([item for item in batch if isinstance(item, dict)])
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()
            if clock() - ticked >= TICK.total_seconds():
                ticked = clock()
                self._tick()

    def _write(self, records: list[Record]) -> None:
        if not records or self._broken:
            return
        lines = "".join(
            json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records
        )
        # What a script names may hold halves of characters, which no file takes.
        remaining = lines.encode(errors="replace")
        try:
            if not self._is_open():
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
        except OSError as error:
            # Training goes on without a record rather than not at all, and says so once.
            self._broken = True
            sys.stderr.write(f"ncclops: receipts are no longer written: {error.strerror}\n")

    def _is_open(self) -> bool:
        """Whether the descriptor is still this file's: a script that closes all that it has not
        opened itself may have given the number to a checkpoint or a connection since."""
        return self._file is not None and _identity(self._fd) == self._file


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
