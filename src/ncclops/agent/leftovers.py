"""What killed runs of this user have left on this machine: swept when the next one starts."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from ncclops.control import launcher
from ncclops.record import control_address, shared_page
from ncclops.record.paths import run_of_page

log = logging.getLogger(__name__)


def sweep_in_background() -> None:
    """A thread, because a run directory may be on a server that does not answer."""
    threading.Thread(target=sweep, name="sweep", daemon=True).start()


def sweep() -> None:
    """Pages and sockets in shared memory that no process holds, and the sockets of such runs.

    What the pages hold goes into the run directory.
    """
    with suppress(OSError):
        control_address.sweep_sockets()
        for run in {run_of_page(page) for page in shared_page.sweep(_has_ended)}:
            log.info("left over by a run that was killed, and swept: %s", run)
            if launcher.is_alive(run) is False:
                control_address.remove_leftovers(run)


def _has_ended(page: Path) -> bool:
    return launcher.is_alive(run_of_page(page)) is False
