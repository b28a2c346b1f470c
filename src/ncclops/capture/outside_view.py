"""The monitor process's part in a snapshot: its main process from outside. Standard library only.

It is the only source for a process that holds its GIL, is stopped, or has died.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ncclops.capture.signal_stacks import StackDumper, dump_stacks
from ncclops.host import process_view
from ncclops.host_name import host_name
from ncclops.record import snapshot_files
from ncclops.record.documents import read_document, write_document
from ncclops.restart.snapshots import LastProgress

log = logging.getLogger("ncclops.restart.monitor")

# Before a process is ended that does not answer; the monitor process has its heartbeats to send.
_DUMP_WITHIN_S = 0.5
_FROM_THE_RANK = [snapshot_files.FLIGHT, snapshot_files.GROUPS, snapshot_files.GPU]


class Observer:
    """Of one rank, see ``ncclops.restart.snapshots.OutsideView``.

    ``pid`` is its main process; the other numbers are those of ``signal_stacks.StackDumper``.
    """

    def __init__(
        self, rank: int, pid: int, *, tid: int, signal: int, stacks_fd: int, main_thread: int
    ) -> None:
        self._rank = rank
        self._pid = pid
        self._dumper = StackDumper(pid, tid, signal, stacks_fd, main_thread)

    def iteration_failed(self, directory: Path | None, progress: LastProgress) -> None:
        """The main process takes its snapshot: add the view from outside."""
        self._write_later(directory, self._view(progress))

    def main_silent(
        self, directory: Path | None, progress: LastProgress, reason: str
    ) -> str | None:
        """No Python thread runs there: the kernel's view, and the stacks by a signal."""
        view = self._view(progress)
        text = dump_stacks(self._dumper, _DUMP_WITHIN_S)
        missing = [*_FROM_THE_RANK, *([] if text else [snapshot_files.STACKS])]
        why = f"it did not answer: {reason}"
        self._write_later(directory, view, stacks=text, reason=why, missing=missing, silent=True)
        return text

    def main_ended(
        self,
        directory: Path | None,
        progress: LastProgress,
        reason: str,
        *,
        by_monitor: bool,
    ) -> None:
        """The main process has ended, and for a moment the kernel still knows how."""
        view = self._view(progress)
        how = view.get("ended_by")  # unless its parent was quicker, which then knows
        why = f"{reason} ({how})" if how else reason
        missing = [*_FROM_THE_RANK, snapshot_files.STACKS]
        ended_for = reason if by_monitor else None
        self._write_later(
            directory, view, reason=why, missing=missing, ended=True, ended_for=ended_for
        )

    def _view(self, progress: LastProgress) -> dict[str, Any]:
        stamp = {
            "rank": self._rank,
            "host": host_name(),
            "pid": self._pid,
            "taken_at": time.time(),
            "source": "monitor-process",
            "main_thread_moved_s_ago": progress.main_thread_s,
            "python_ran_s_ago": progress.python_s,
            "pinged_s_ago": progress.ping_s,
        }
        return stamp | (process_view.view(self._pid) or {"state": None, "state_name": "gone"})

    def _write_later(
        self,
        incident: Path | None,
        view: dict[str, Any],
        *,
        stacks: str | None = None,
        reason: str | None = None,
        missing: list[str] | None = None,
        silent: bool = False,
        ended: bool = False,
        ended_for: str | None = None,
    ) -> None:
        """Write in a thread: the monitor process cannot wait for a slow disk."""
        if incident is None:
            return
        directory = snapshot_files.rank_dir(incident, self._rank)

        def write() -> None:
            # What was seen before it died says more than that it is gone.
            last = {"end": view} if view["state"] in (None, "Z") else view
            before = read_document(directory / snapshot_files.PROCESS)
            write_document(directory / snapshot_files.PROCESS, (before or view) | last)
            if stacks is not None:
                snapshot_files.write_stacks(directory, stacks)
            if reason is not None:
                have = {path.name for path in directory.iterdir()}
                snapshot_files.add_missing(
                    directory,
                    reason,
                    sorted(set(missing or []) - have),
                    silent=silent,
                    ended=ended,
                    ended_well=ended and bool(view.get("ended_well")),
                    ended_signal=view.get("ended_signal"),
                    ended_for=ended_for,
                )

        threading.Thread(target=_reported(write)).start()


def _reported(action: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            action()
        except OSError as error:
            log.warning("the view of the main process could not be written: %s", error)

    return run
