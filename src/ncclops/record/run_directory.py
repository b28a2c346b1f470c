"""A run directory being written: made, claimed, and filled with events and documents."""

from __future__ import annotations

import os
import secrets
import sys
from datetime import datetime
from pathlib import Path

import msgspec

from ncclops.errors import UsageError
from ncclops.record import event_log
from ncclops.record.events import Event
from ncclops.record.paths import DEFAULT_PARENT, RunPaths
from ncclops.record.run_record import RUN, RunRecord
from ncclops.record.verdict_record import VERDICT, VerdictRecord


class RunDirectory:
    """The files of one run. Create with :meth:`create`, which makes the directory."""

    def __init__(self, path: Path, run_id: str, node: str) -> None:
        self.path = path
        self.paths = RunPaths(path)
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
                wanted = RunPaths(wanted).of_node(node)
                wanted.mkdir(parents=True, exist_ok=True)
            paths = RunPaths(wanted.resolve())
            if paths.run.exists():
                raise UsageError(
                    f"{wanted} already holds a run, and records are never overwritten:"
                    " give --run-dir another path or remove it"
                )
            paths.events.touch()
            return cls(paths.root, run_id, node)
        except OSError as error:
            raise UsageError(
                f"cannot write the run directory {wanted} ({error.strerror}):"
                " give --run-dir a path that can be written"
            ) from error

    def shown(self, path: Path | None = None) -> str:
        """``path`` (default the directory) as a person would type it from here."""
        absolute = path or self.path
        try:
            return (
                os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(absolute)
            )
        except OSError:  # the current directory is gone
            return str(absolute)

    def add(self, event: Event) -> None:
        """Append ``event``, of now unless it has a time.

        A full disk ends the record and not the run; a message says so once.
        """
        try:
            event_log.append(self.paths.events, event, self.node)
        except OSError as error:
            self._complain(self.paths.events, error)

    def _complain(self, path: Path, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            sys.stderr.write(f"ncclops: cannot write {self.shown(path)}: {error.strerror}\n")

    def write_run(self, record: RunRecord) -> None:
        """Write what is started, under this run's id. Raises ``OSError``."""
        RUN.write(self.paths.run, msgspec.structs.replace(record, run_id=self.run_id))

    def write_verdict(self, verdict: VerdictRecord) -> None:
        """Write the verdict; if the disk is full, the terminal and the exit code still say it."""
        try:
            VERDICT.write(self.paths.verdict, verdict)
        except OSError as error:
            self._complain(self.paths.verdict, error)


def _claim(directory: Path, node: str) -> bool:
    """Whether ``directory`` is ours from now on, and not another node's."""
    try:
        with RunPaths(directory).owner.open("x") as claim:
            claim.write(f"{node}\n")
    except FileExistsError:
        return False
    return True
