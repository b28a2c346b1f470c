"""What a worker reports to the agent: events, one a line, in ``worker.jsonl`` of its rank.

The agent follows the file and takes the lines over into the run's ``events.jsonl``.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from ncclops.record import event_log, run_record
from ncclops.record.events import Event
from ncclops.record.paths import RunPaths
from ncclops.record.variables import RUN_DIR, RUN_ID


@functools.cache
def _own() -> tuple[int, str]:
    return os.getpid(), os.environ.get("RANK", "0")


def own_rank() -> str:
    """As this process was started; call it before a restart gives the process another number."""
    return _own()[1]


def report(event: Event) -> None:
    """Append ``event``; outside `launch`, and on a full disk, nothing happens.

    It is about this process's rank unless it names another. Nor does anything happen in a process
    that the worker has forked: its end is not the end of the worker. Nor where another run has the
    directory by now: its rank of this number would be taken for finished.
    """
    run_dir = os.environ.get(RUN_DIR)
    pid, rank = _own()
    if run_dir is None or not rank.isdecimal() or os.getpid() != pid:
        return
    paths = RunPaths(Path(run_dir))
    run_id = os.environ.get(RUN_ID)
    if run_id is not None and run_record.is_of_another(paths.run, run_id):
        return
    try:
        event_log.append(paths.rank(int(rank)).worker_events, event)
    except OSError:
        return
