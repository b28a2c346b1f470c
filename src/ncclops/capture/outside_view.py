"""The guardian's part in a snapshot: its main process from outside. Standard library only.

It is the only one who can speak for a process that holds its GIL, is stopped, or has died.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ncclops.capture.signal_stacks import StackDumper, dump_stacks
from ncclops.host import process_view
from ncclops.record import incidents as layout
from ncclops.restart._page import Page

log = logging.getLogger("ncclops.restart.guardian")

# Before a process is ended that does not answer; the guardian has its heartbeats to send.
_DUMP_WITHIN_S = 0.5
_FROM_THE_RANK = [layout.FLIGHT, layout.GROUPS, layout.GPU]


class Observer:
    """Sees for one guardian. ``incidents`` is their directory, ``page`` the rank's shared page."""

    def __init__(self, incidents: Path, rank: int, pid: int, page: Page) -> None:
        self._incidents = incidents
        self._rank = rank
        self._pid = pid
        self._page = page
        self._silent_in: float | None = None  # the iteration; once in each is enough
        self.stacks: str | None = None  # as of the last look at a silent process

    def look(self, iteration: int) -> None:
        """The main process takes its snapshot as ``iteration`` ends: add the view from outside.

        When a guardian that has just started hears of it, another iteration may have begun.
        """
        self._write_later(self._view(), iteration=iteration)

    def look_at_silent(self, why: str) -> None:
        """No Python thread runs there: the kernel's view, and the stacks by a signal.

        Returns within half a second.
        """
        if self._silent_in == self._page.iteration:
            return
        self._silent_in = self._page.iteration
        view = self._view()
        text = self.stacks = dump_stacks(self._dumper(), _DUMP_WITHIN_S)
        missing = [*_FROM_THE_RANK, *([] if text else [layout.STACKS])]
        self._write_later(view, stacks=text, reason=f"it did not answer: {why}", missing=missing)

    def look_at_dead(self, why: str) -> None:
        """The main process has ended, and for a moment the kernel still knows how."""
        view = self._view()
        how = view.get("ended_by")  # unless its parent was quicker, which then knows
        reason = f"{why} ({how})" if how else why
        missing = [*_FROM_THE_RANK, layout.STACKS]
        self._write_later(view, reason=reason, missing=missing)

    def _view(self) -> dict[str, Any]:
        now, page = time.monotonic(), self._page
        stamp = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": self._pid,
            "taken_at": time.time(),
            "source": "guardian",
            "main_thread_moved_s_ago": round(now - page.main_beat, 3),
            "python_ran_s_ago": round(now - page.watchdog_tick, 3),
            "pinged_s_ago": round(now - page.ping, 3) if page.ping else None,
        }
        return stamp | (process_view.view(self._pid) or {"state": None, "state_name": "gone"})

    def _dumper(self) -> StackDumper:
        page = self._page
        return StackDumper(
            pid=self._pid,
            tid=int(page.witness_tid),
            signal=int(page.witness_signal),
            stacks_fd=int(page.witness_stacks_fd),
            main_thread=int(page.main_thread),
        )

    def _write_later(
        self,
        view: dict[str, Any],
        *,
        stacks: str | None = None,
        reason: str | None = None,
        missing: list[str] | None = None,
        iteration: int | None = None,
    ) -> None:
        """Write in a thread: the guardian's own work cannot wait for a slow disk."""
        iteration = int(self._page.iteration) if iteration is None else iteration
        first = int(self._page.incidents_from)
        if iteration < 0 or not first:
            return  # before the first iteration there is no incident
        directory = layout.rank_dir(self._incidents / str(first - 1 + iteration), self._rank)

        def write() -> None:
            # What was seen before it died says more than that it is gone.
            last = {"end": view} if view["state"] in (None, "Z") else view
            before = layout.read_json(directory / layout.PROCESS)
            layout.write_json(directory / layout.PROCESS, (before or view) | last)
            if stacks is not None:
                layout.write(directory / layout.STACKS, stacks.encode())
            if reason is not None:
                have = {path.name for path in directory.iterdir()}
                layout.add_missing(directory, reason, sorted(set(missing or []) - have))

        threading.Thread(target=_reported(write)).start()


def _reported(action: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            action()
        except OSError as error:
            log.warning("the view of the main process could not be written: %s", error)

    return run
