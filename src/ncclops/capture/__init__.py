"""What each rank is doing right now, written down: stacks, flight recorder, groups, GPU.

From inside the worker where it answers, from outside (signals, ``/proc``) where it does not.
"""

from __future__ import annotations


def install() -> None:
    """Have every ``ncclops.restart.Wrapper`` of this process take snapshots of its rank.

    They are written below ``Wrapper(incident_dir=...)`` for each incident, beside incident.json;
    without ``incident_dir`` nothing is taken. Affects calls that begin later. Any thread.
    In workers of ``ncclops launch`` this is done already.
    """
    from ncclops.capture.incident_snapshots import IncidentSnapshots
    from ncclops.restart import snapshots

    snapshots.register(IncidentSnapshots)
