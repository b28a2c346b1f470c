"""Incidents that are no faults: ranks that leave because restarts in place cannot help.

What led there is the fault before, and the leaving is what was decided on it. Records of versions
that wrote no ``raised`` and ``escalation`` count as faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ncclops.record import incidents

_LEFT_BY = "RestartAbort"  # ncclops.restart.exception, which nothing here needs


def read_record(directory: Path) -> dict[str, Any]:
    """incident.json, or what a rank that left wrote where none went on; empty without either."""
    candidates = [directory / incidents.INCIDENT, *sorted(directory.glob("left-rank*.json"))]
    return next(filter(None, map(incidents.read_json, candidates)), {})


def is_leaving(record: Mapping[str, Any]) -> bool:
    """Whether the incident is about an earlier one."""
    raised = record.get("raised")
    left = isinstance(raised, dict) and raised.get("name") == _LEFT_BY
    return left and record.get("escalation") is not None


def fault_before(parent: Path, number: int) -> int | None:
    """The incident in ``parent`` that led to the leaving in ``number``, if that is one."""
    if not is_leaving(read_record(parent / str(number))):
        return None
    for earlier in reversed([each for each in incidents.numbers(parent) if each < number]):
        record = read_record(parent / str(earlier))
        if record and not is_leaving(record):
            return earlier
    return None


def next_fault_at(parent: Path, number: int) -> float:
    """When the next fault after incident ``number`` was, by its wall clock; infinite if none."""
    for later in (each for each in incidents.numbers(parent) if each > number):
        record = read_record(parent / str(later))
        if isinstance(record.get("at"), int | float) and not is_leaving(record):
            return float(record["at"])
    return float("inf")
