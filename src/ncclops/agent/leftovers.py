"""What killed runs of this user have left on this machine: swept when the next one starts."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

from ncclops.control import launcher
from ncclops.record import control_address, shared_page
from ncclops.record.paths import run_of_page

log = logging.getLogger(__name__)

# Ranks open each other's segments while they connect, which takes minutes at most.
_CONNECTED_AFTER_S = 3600.0


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
    with suppress(OSError):
        sweep_nccl_segments()


def _has_ended(page: Path) -> bool:
    return launcher.is_alive(run_of_page(page)) is False


def sweep_nccl_segments() -> None:
    """Segments of NCCL's in shared memory: it leaves those of ranks that were killed while they
    connected. Only this user's, that no process has mapped, and not those of the last hour: other
    containers may share the memory, whose processes are not seen here."""
    old = [path for path in Path("/dev/shm").glob("nccl-*") if _is_old_and_ours(path)]
    if not old:
        return
    mapped = _mapped()
    for path in old:
        if str(path) not in mapped:
            path.unlink(missing_ok=True)
            log.info("left over by NCCL, and swept: %s", path)


def _is_old_and_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:  # it has gone meanwhile
        return False
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and time.time() - found.st_mtime > _CONNECTED_AFTER_S


def _mapped() -> set[str]:
    """The files that processes have mapped, as far as this user may know."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines = maps.read_text(errors="replace").splitlines()
            found |= {line.partition("/")[1] + line.partition("/")[2] for line in lines}
    return found
