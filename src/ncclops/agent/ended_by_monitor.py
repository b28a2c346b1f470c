"""Ranks that the restart core has ended, by what their monitor processes have noted.

As a rule the ranks that go on tell why. Where none does, as on a host that is cut off from all
others, only a signal would be known of the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ncclops.agent.workers import Worker
from ncclops.record import snapshot_records
from ncclops.record.snapshot_files import rank_dir

_SIGNALS = ("SIGTERM", "SIGKILL")
_NEWEST = 3  # a process ends in the last iteration that it has come to, or one before


def why_ended(incidents: Path, ended: Iterable[Worker]) -> dict[int, str]:
    """Why, by rank, of those ``ended`` of which a note below ``incidents`` tells it."""
    killed = [w for w in ended if w.exit is not None and w.exit.signal in _SIGNALS]
    if not killed:
        return {}
    try:
        numbers = sorted(int(each.name) for each in incidents.iterdir() if each.name.isdecimal())
    except OSError:
        return {}
    found = dict[int, str]()
    for number in numbers[-_NEWEST:]:
        for worker in killed:
            directory = rank_dir(incidents / str(number), worker.rank)
            why = snapshot_records.missing(directory).ended_for
            if why and snapshot_records.process(directory).pid == worker.pid:
                found[worker.rank] = why
    return found
