"""The run directory: the one owner of its file names, and the one place that writes its records.

<run>/run.json              what was started: profile, plan, stack, command, nodes
<run>/events.jsonl          one JSON object per event, appended and flushed
<run>/store.log             output of the store server
<run>/control/              http.sock, token, server.log (``ncclops.control``), stop (a page of
                            memory, ``ncclops.record.stop_point``)
<run>/incidents/<n>/        incident.json: why an iteration ended, and what the restart took; the
                            snapshot of each rank (``ncclops.record.incidents``)
<run>/where/<n>/            snapshots of a look from outside (``ncclops where``)
<run>/ranks/<rank>/         of the initial rank: stdout.log, stderr.log, error-<attempt>.json,
                            worker.jsonl (what the worker tells the agent), environment.json
                            (its environment, secrets redacted), receipt.jsonl
<run>/verdict.json          how it ended
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from ncclops.errors import UsageError
from ncclops.record import worker_record

DEFAULT_PARENT = Path("runs")
RECEIPT = "receipt.jsonl"


class RunDirectory:
    """The files of one run. Create with :meth:`create`, which makes the directory."""

    EVENTS = "events.jsonl"

    def __init__(self, path: Path, run_id: str, node: str) -> None:
        self.path = path
        self.run_id = run_id
        self.node = node
        self._complained = False

    @classmethod
    def create(
        cls, *, exact: Path | None, parent: Path | None, node: str, several: bool = False
    ) -> RunDirectory:
        """Make ``exact``, or a fresh directory of its own below ``parent`` (default ``runs``).

        With ``several`` nodes, which may all be given the same directory of a shared file system,
        the first one to come takes it, and each of the others ``exact``/nodes/``node``.

        Raises ``UsageError`` when it cannot be made or written, or ``exact`` already holds a run.
        """
        run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        wanted = exact if exact is not None else (parent or DEFAULT_PARENT) / run_id
        try:
            wanted.mkdir(parents=True, exist_ok=exact is not None)
            if several and not _claim(wanted, node):
                wanted = wanted / "nodes" / node
                wanted.mkdir(parents=True, exist_ok=True)
            path = wanted.resolve()
            if (path / "run.json").exists():
                raise UsageError(
                    f"{wanted} already holds a run, and records are never overwritten:"
                    " give --run-dir another path or remove it"
                )
            (path / cls.EVENTS).touch()
            return cls(path, run_id, node)
        except OSError as error:
            raise UsageError(
                f"cannot write the run directory {wanted} ({error.strerror}):"
                " give --run-dir a path that can be written"
            ) from error

    @property
    def run_path(self) -> Path:
        return self.path / "run.json"

    @property
    def events_path(self) -> Path:
        return self.path / self.EVENTS

    @property
    def verdict_path(self) -> Path:
        return self.path / "verdict.json"

    @property
    def store_log(self) -> Path:
        return self.path / "store.log"

    def rank_dir(self, rank: int) -> Path:
        return self.path / "ranks" / str(rank)

    def stdout_log(self, rank: int) -> Path:
        return self.rank_dir(rank) / "stdout.log"

    def stderr_log(self, rank: int) -> Path:
        return self.rank_dir(rank) / "stderr.log"

    def worker_events(self, rank: int) -> Path:
        """What the worker tells the agent; see ``ncclops.record.worker_record``."""
        return self.rank_dir(rank) / worker_record.FILE_NAME

    def receipt(self, rank: int) -> Path:
        """What the worker records of its training; see ``ncclops.receipts.recorder``."""
        return self.rank_dir(rank) / RECEIPT

    def error_file(self, rank: int, attempt: int) -> Path:
        """Where torchelastic's ``@record`` or our worker entry describes an exception."""
        return self.rank_dir(rank) / f"error-{attempt}.json"

    def shown(self, path: Path | None = None) -> str:
        """``path`` (default the directory) as a person would type it from here."""
        absolute = path or self.path
        try:
            return (
                os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(absolute)
            )
        except OSError:  # the current directory is gone
            return str(absolute)

    def event(
        self, event: str, *, rank: int | None = None, ts: float | None = None, **fields: Any
    ) -> None:
        """Append one event, of now or of ``ts`` (seconds since the epoch).

        One unbuffered write each, so that no kill can leave half a record.

        A full disk ends the record and not the run; it is said once.
        """
        when = time.time() if ts is None else ts
        record = {"ts": when, "event": event, "rank": rank, "node": self.node, **fields}
        try:
            with self.events_path.open("ab", buffering=0) as events:
                events.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            self._complain(self.events_path, error)

    def _complain(self, path: Path, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            sys.stderr.write(f"ncclops: cannot write {self.shown(path)}: {error.strerror}\n")

    def write_run(self, document: dict[str, Any]) -> None:
        _write_json(self.run_path, {"schema": "ncclops.run/1", "run_id": self.run_id, **document})

    def write_verdict(self, document: dict[str, Any]) -> None:
        """Write the last word; if the disk is full, the terminal and the exit code still say it."""
        try:
            _write_json(self.verdict_path, document)
        except OSError as error:
            self._complain(self.verdict_path, error)


def _claim(directory: Path, node: str) -> bool:
    """Whether ``directory`` is ours from now on, and not another node's."""
    try:
        with (directory / ".node").open("x") as claim:
            claim.write(f"{node}\n")
    except FileExistsError:
        return False
    return True


def _write_json(path: Path, document: dict[str, Any]) -> None:
    # Whole or not at all: a reader never meets half a document.
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n")
    partial.replace(path)
