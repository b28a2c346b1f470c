"""What the restart core logs in this worker: into a file, and not between the script's lines."""

from __future__ import annotations

import logging
from pathlib import Path

from ncclops.record.log_file import LogFile

log = logging.getLogger("ncclops.restart")


def write_to(path: Path) -> logging.Handler:
    """From now on its records go to ``path`` alone.

    An error there would be one of the rank to the restart core, which would restart without end.
    """
    handler = LogFile(path, delay=True, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return handler


def leave_to_script(handler: logging.Handler) -> None:
    """From now on they go where the script's own wrapper sends them."""
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)
    log.propagate = True
    handler.close()
