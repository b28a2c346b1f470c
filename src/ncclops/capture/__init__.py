"""What each rank is doing right now, written down: stacks, flight recorder, groups, GPU.

From inside the worker where it answers, from outside (signals, ``/proc``) where it does not.
"""

from __future__ import annotations


def install() -> None:
    """Have every ``ncclops.restart.Wrapper`` of this process take snapshots of its rank.

    They are written below ``Wrapper(incident_dir=...)`` for each incident, beside incident.json;
    without ``incident_dir`` nothing is taken. Counts for calls that begin later. Any thread.
    Workers of ``ncclops launch`` have it already.
    """
    from ncclops.capture.incident_snapshots import IncidentSnapshots
    from ncclops.restart import snapshots

    snapshots.register(IncidentSnapshots)
