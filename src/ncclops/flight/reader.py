"""Many dumps read at once, each in a process with limits; the parent never parses a dump.

Blocks until every file has been read or given up. A process that dies or takes too long costs
its one file; the next gets a fresh process.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ncclops.exhausted import reason
from ncclops.flight.model import RankRecord
from ncclops.flight.reader_process import ANSWER

# CPU time for one file, of which the reading process allows less to a small one.
READ_LIMIT = timedelta(seconds=60)
# By the clock: a file server may be slow, and a machine busy.
_PATIENCE_S = 300.0
# After so many files that no recorder has written, each at the limit, a directory has no others.
_MOST_LOST = 3
_FILES_A_PROCESS = 12
_MOST_PROCESSES = 8


@dataclass(frozen=True)
class Result:
    """One file: its record, or why there is none. ``is_other``: readable, and no dump."""

    path: Path
    record: RankRecord | None = None
    reason: str = ""
    is_other: bool = False


def read_files(
    files: Sequence[tuple[Path, int | None]], limit: timedelta = READ_LIMIT
) -> list[Result]:
    """Read dumps, given as path and the rank that the name says; results in the same order.

    ``limit`` is the CPU time that one file may take, in whole seconds.
    """
    tasks: queue.SimpleQueue[tuple[int, Path, int | None]] = queue.SimpleQueue()
    for index, (path, rank) in enumerate(files):
        tasks.put((index, path, rank))
    results: dict[int, Result] = {}
    count = min(os.cpu_count() or 1, _MOST_PROCESSES, -(-len(files) // _FILES_A_PROCESS))
    threads = [
        threading.Thread(target=_serve, args=(tasks, results, limit), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(files))]


def _serve(
    tasks: queue.SimpleQueue[tuple[int, Path, int | None]],
    results: dict[int, Result],
    limit: timedelta,
) -> None:
    child: _Child | None = None
    lost_before = 0
    try:
        while True:
            try:
                index, path, rank = tasks.get_nowait()
            except queue.Empty:
                return
            if lost_before >= _MOST_LOST:
                results[index] = Result(path, reason=f"left out after {_MOST_LOST} such files")
                continue
            try:
                child = child or _Child()
                results[index] = child.read(path, rank, limit)
            except _Lost as lost:
                results[index] = Result(path, reason=str(lost))
                lost_before += 1
                if child is not None:
                    child.close()
                child = None
    finally:
        if child is not None:
            child.close()


class _Lost(Exception):
    """The process died or took too long; the message says it of the file."""


class _Child:
    """One reading process."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ncclops.flight.reader_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        except OSError as error:
            raise _Lost(f"could not be read: no process starts: {reason(error)}") from None

    def read(self, path: Path, rank: int | None, limit: timedelta) -> Result:
        stdin = self._process.stdin
        assert stdin is not None
        request = {"path": str(path), "rank": rank, "cpu_s": int(limit.total_seconds())}
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
        except OSError:
            raise _Lost("could not be read: the reading process ended") from None
        (size,) = ANSWER.unpack(self._receive(ANSWER.size))
        # Our own process wrote this, whatever the dump held.
        kind, value = pickle.loads(self._receive(size))
        if kind == "record":
            return Result(path, record=value)
        return Result(path, reason=value, is_other=kind == "other")

    def _receive(self, size: int) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        parts = []
        while size > 0:
            if not select.select([stdout], [], [], _PATIENCE_S)[0]:
                raise _Lost(f"could not be read within {_PATIENCE_S:g} s")
            part = os.read(stdout.fileno(), min(size, 1 << 20))
            if not part and self._process.wait() == -signal.SIGXCPU:
                raise _Lost(
                    "takes more CPU to read than any dump of its size: not as a recorder writes it"
                )
            if not part:
                raise _Lost("brought down the process that read it: not as a recorder writes it")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()
