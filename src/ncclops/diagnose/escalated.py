"""Incidents that are no faults: ranks that leave because restarts in place cannot help.

What led there is the fault before, and the leaving is what was decided on it. Records of versions
that wrote no ``raised`` and ``escalation`` count as faults.
"""

from __future__ import annotations

from pathlib import Path

from ncclops.record import incident_record
from ncclops.record.incident_record import IncidentRecord
from ncclops.record.paths import numbered

_LEFT_BY = "RestartAbort"  # ncclops.restart.exception, which nothing here needs


def is_leaving(incident: IncidentRecord) -> bool:
    """Whether the incident is about an earlier one."""
    left = incident.raised is not None and incident.raised.name == _LEFT_BY
    return left and incident.escalation is not None


def fault_before(parent: Path, number: int) -> int | None:
    """The incident in ``parent`` that led to the leaving in ``number``, if that is one."""
    left = incident_record.read(parent / str(number))
    if left is None or not is_leaving(left):
        return None
    for earlier in reversed([each for each in numbered(parent) if each < number]):
        incident = incident_record.read(parent / str(earlier))
        if incident is not None and not is_leaving(incident):
            return earlier
    return None


def next_fault_at(parent: Path, number: int) -> float:
    """When the next fault after incident ``number`` was, by its wall clock; infinite if none."""
    for later in (each for each in numbered(parent) if each > number):
        incident = incident_record.read(parent / str(later))
        if incident is not None and not is_leaving(incident):
            return incident.at
    return float("inf")
