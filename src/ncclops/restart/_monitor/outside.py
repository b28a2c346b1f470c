"""The main process as it is seen from here when an iteration fails: for its snapshot.

What looks was handed in, see ``snapshots.OutsideViewSource``; without it nothing is looked at.
Standard library only.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ncclops.restart._monitor.link import Page
from ncclops.restart.snapshots import LastProgress, OutsideView

log = logging.getLogger("ncclops.restart.monitor")

T = TypeVar("T")


class Outside:
    """Looks at the process that ``page`` is of; a look that fails is logged, and goes no further.

    ``stacks`` are those of its threads, as of the latest look at a silent one.
    """

    def __init__(self, page: Page, config: dict[str, Any]) -> None:
        self.stacks: str | None = None
        self._page = page
        self._incident_dir: str | None = config["incident_dir"]
        self._view = _load(config)
        self._silent_in: float | None = None  # the iteration; one look in each is enough

    def iteration_failed(self, iteration: int) -> None:
        """The main process takes its own snapshot at this moment."""
        directory = self._directory(iteration)
        self._look(lambda view: view.iteration_failed(directory, self._progress()))

    def main_silent(self, reason: str) -> None:
        """No Python thread runs there, or it is about to be ended."""
        if self._silent_in != self._page.iteration:
            self._silent_in = self._page.iteration
            directory, progress = self._directory(), self._progress()
            self.stacks = self._look(lambda view: view.main_silent(directory, progress, reason))

    def main_ended(self, cause: str, *, by_monitor: bool) -> None:
        """It has ended."""
        directory, progress = self._directory(), self._progress()
        self._look(lambda view: view.main_ended(directory, progress, cause, by_monitor=by_monitor))

    def _look(self, look: Callable[[OutsideView], T]) -> T | None:
        if self._view is None:
            return None
        try:
            return look(self._view)
        except Exception:
            log.exception("the view of the main process from outside failed")
            return None

    def _directory(self, iteration: int | None = None) -> Path | None:
        """Of the incident that ends ``iteration``, by default the present one."""
        # When a monitor process that has just started looks, another iteration may have begun.
        iteration = int(self._page.iteration) if iteration is None else iteration
        first = int(self._page.incidents_from)
        if self._incident_dir is None or iteration < 0 or not first:
            return None
        return Path(self._incident_dir) / str(first - 1 + iteration)

    def _progress(self) -> LastProgress:
        now, page = time.monotonic(), self._page
        ping_s = round(now - page.ping, 3) if page.ping else None
        return LastProgress(
            round(now - page.main_beat, 3), round(now - page.watchdog_tick, 3), ping_s
        )


def _load(config: dict[str, Any]) -> OutsideView | None:
    if config["outside_view"] is None:
        return None
    factory, arguments = config["outside_view"]
    try:
        module, _, name = factory.partition(":")
        make = getattr(importlib.import_module(module), name)
        view: OutsideView = make(config["rank"], config["main_pid"], **arguments)
        return view
    except Exception:
        log.exception("%s cannot be used for snapshots", factory)
        return None
