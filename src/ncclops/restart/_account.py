"""Account of a rank's restarts: what each phase took, and who is told when one has succeeded."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ncclops.restart import incident as incidents
from ncclops.restart.agreement import Agreement
from ncclops.restart.attribution import Fault
from ncclops.restart.incident import Incident, IncidentDirectories
from ncclops.restart.log import logged
from ncclops.restart.monitor_thread import Aborted
from ncclops.restart.state import State

log = logging.getLogger("ncclops.restart")


@dataclass(frozen=True)
class _Restart:
    """A restart on its way: how the last iteration ended, and what the phases took so far."""

    agreement: Agreement
    before: State
    phases_ms: dict[str, float]


class Account:
    """Of one call. ``on_incident`` gets each incident; ``directories`` is where one rank writes it.

    ``on_lost`` is called on that rank for each rank that was lost: with the incident's directory,
    the initial rank and the reason.
    """

    def __init__(
        self,
        directories: IncidentDirectories | None,
        on_incident: Callable[[Incident], object] | None,
        on_lost: Callable[[Path, int, str], object] | None,
    ) -> None:
        self._directories = directories
        self._on_incident = on_incident
        self._on_lost = on_lost
        self._phases_ms: dict[str, float] = {}
        self._restart: _Restart | None = None  # until the function has been entered again
        self._seen_at = 0.0
        self._entered_at = time.monotonic()

    # --- the phases ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is phase ``name`` of ``incident.PHASES``."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._phases_ms[name] = 1000 * (time.monotonic() - started)

    def aborted(self, news: Aborted) -> None:
        """A restart begins, with what the monitor thread did."""
        self._phases_ms = {"collect": 1000 * news.collect_s, "abort": 1000 * news.abort_s}
        self._seen_at = time.time() - (time.monotonic() - news.seen_at)

    def agreed(self, faults: Sequence[Fault]) -> None:
        """These were the iteration's faults."""
        if faults:
            detected_s = self._seen_at - min(fault.at for fault in faults)
            self._phases_ms["detect"] = max(0.0, 1000 * detected_s)

    def entering(self) -> None:
        """An iteration begins."""
        self._entered_at = time.monotonic()

    # --- telling ------------------------------------------------------------------------------

    def restarting(self, agreement: Agreement, before: State) -> None:
        """All ranks have their new numbers: what remains is to enter the function."""
        self._restart = _Restart(agreement, before, self._phases_ms)

    def restarted(self, state: State) -> None:
        """The function is entered, or will not be: tell of the restart, unless that is done."""
        restart, self._restart = self._restart, None
        if restart is not None:
            restart.phases_ms["enter"] = 1000 * (time.monotonic() - self._entered_at)
            self._make_known(restart, state)

    def leaving(self, agreement: Agreement, state: State) -> None:
        """This rank takes no part in the restart."""
        self._make_known(_Restart(agreement, state, self._phases_ms), None)

    def _make_known(self, restart: _Restart, after: State | None) -> None:
        """Log the incident, write it down (one rank does) and hand it to the hook."""
        incident = incidents.describe(restart.agreement, restart.before, after, restart.phases_ms)
        writes = after is None or after.rank == 0
        log.log(logging.WARNING if writes else logging.INFO, "%s", incident)
        if self._directories is not None and writes:
            with logged("writing the incident"):
                self._write(incident, self._directories.of(incident.iteration))
        if self._on_incident is not None:
            with logged("on_incident"):
                self._on_incident(incident)

    def _write(self, incident: Incident, directory: Path) -> None:
        incidents.write(incident, directory)
        if self._on_lost is not None and incident.rank is not None:
            for fault in incident.faults:
                if fault.gone:
                    self._on_lost(directory, fault.initial_rank, fault.summary)
