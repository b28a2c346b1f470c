"""The run's incidents as ``ncclops incident`` describes them, for the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ncclops.errors import NcclopsError

# Each is analysed anew, which takes a fraction of a second, or seconds with a thousand ranks.
_MOST = 5


def newest_reports(run: Path) -> Iterator[dict[str, Any]]:
    """The newest faults on record, as ``ncclops.incident/1``; what cannot be read is left out."""
    from ncclops.diagnose import escalated
    from ncclops.diagnose.incident_report import report_incident
    from ncclops.record.paths import RunPaths, numbered

    parent = RunPaths(run).incidents
    faults = [
        number for number in numbered(parent) if escalated.fault_before(parent, number) is None
    ]
    for number in faults[-_MOST:]:
        try:
            yield report_incident(run, number).to_json()
        except (NcclopsError, OSError, LookupError, TypeError, ValueError):  # none, or damaged
            continue


def facts(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines below an incident's sentence on the page: label and text."""
    from ncclops.rank_lists import ranks_named

    culprit, found, decision = report["culprit"], report["classification"], report["decision"]
    host = f" on {culprit['host']}" if culprit["host"] else ""
    yield "culprit", f"rank {culprit['rank']}{host}: {culprit['how']}"
    if culprit["frame"] is not None:
        yield "at", _place(culprit["frame"])
    if culprit["callers"]:
        yield "called by", ", ".join(map(_place, culprit["callers"]))
    if found is not None:
        yield "class", f"{found['class']}: {found['summary']}"
    why = f", because {decision['why']}" if decision["why"] else ""
    yield "decided", decision["what"] + why
    for cluster in report["clusters"]:
        ranks = cluster["ranks"]
        yield ranks_named(ranks), str(cluster["place"])
    for step in report["next_steps"]:
        yield "next", step


def _place(frame: dict[str, Any]) -> str:
    return f"{frame['file']}:{frame['line']} in {frame['function']}"
