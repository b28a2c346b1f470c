"""What a worker reports to the agent: events, one a line, in ``worker.jsonl`` of its rank.

The agent follows the file and takes the lines over into the run's ``events.jsonl``.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from ncclops.record import event_log
from ncclops.record.events import Event
from ncclops.record.paths import RunPaths
from ncclops.record.variables import RUN_DIR


@functools.cache
def own_rank() -> str:
    """As this process was started; call it before a restart gives the process another number."""
    return os.environ.get("RANK", "0")


def report(event: Event) -> None:
    """Append ``event``; outside `launch`, and on a full disk, nothing happens.

    It is about this process's rank unless it names another.
    """
    run_dir = os.environ.get(RUN_DIR)
    rank = own_rank()
    if run_dir is None or not rank.isdecimal():
        return
    try:
        event_log.append(RunPaths(Path(run_dir)).rank(int(rank)).worker_events, event)
    except OSError:
        return
