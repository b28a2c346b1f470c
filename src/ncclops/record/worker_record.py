"""What a worker reports to the agent: events, one a line, in ``worker.jsonl`` of its rank.

The agent follows the file and takes the lines over into the run's ``events.jsonl``.
"""

from __future__ import annotations

import os
from pathlib import Path

from ncclops.record import event_log
from ncclops.record.events import Event
from ncclops.record.paths import RunPaths
from ncclops.record.variables import RUN_DIR

# Before any restart gives this process another number.
_RANK = os.environ.get("RANK", "0")


def report(event: Event) -> None:
    """Append ``event``; outside `launch`, and on a full disk, nothing happens.

    It is about this process's rank unless it names another.
    """
    run_dir = os.environ.get(RUN_DIR)
    if run_dir is None or not _RANK.isdecimal():
        return
    try:
        event_log.append(RunPaths(Path(run_dir)).rank(int(_RANK)).worker_events, event)
    except OSError:
        return
