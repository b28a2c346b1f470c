"""An incident on one page, in lines for people: parts of text, each with a style."""

from __future__ import annotations

from collections.abc import Iterator

from ncclops.diagnose.incident_report import IncidentReport
from ncclops.diagnose.log_evidence import REPORTED
from ncclops.diagnose.stacks_text import StyledLine
from ncclops.moments import format_moment
from ncclops.rank_lists import rank_list

_SHOWN_CLUSTERS = 6
_SHOWN_FRAMES = 4


def incident_lines(report: IncidentReport) -> Iterator[StyledLine]:
    """Who, where, why, what was decided, what to do next."""
    yield ((report.sentence, "bold"),)
    for name, text in _facts(report):
        yield ((f"  {name:<9} ", "dim"), (text, ""))
    for line in (report.classification or {}).get("evidence", []):
        if line["role"] != "cause" and line["file"] == REPORTED:
            continue  # frames of the culprit's own traceback: "at" and "called" have them
        yield ((f"  {line['role']:<9} {line['file']}:{line['line']}: {line['text']}", ""),)
    yield from _clusters(report)
    if report.next_steps:
        yield (("what to do next", "bold"),)
        for step in report.next_steps:
            yield ((f"  - {step}", ""),)
    left = "" if report.left_in is None else f"; the ranks left in incident {report.left_in}"
    yield ((f"incident {report.number}: {report.directory}{left}", "dim"),)


def _facts(report: IncidentReport) -> list[tuple[str, str]]:
    culprit, record = report.culprit, report.record
    rows = [("when", f"{format_moment(record.at)}, in iteration {record.iteration}")]
    host = f" on {culprit.host}" if culprit.host else ""
    rows.append(("culprit", f"rank {culprit.rank}{host}: {culprit.how}"))
    if culprit.frame is not None:
        rows.append(("at", str(culprit.frame)))
    if culprit.callers:
        rows.append(("called", "by " + ", by ".join(map(str, culprit.callers))))
    if report.classification is not None:
        found = report.classification
        rows.append(("class", f"{found['class']} ({found['confidence']:.2g}): {found['summary']}"))
    if report.recorded is not None and not report.culprit.by_recorders:
        rows.append(("recorders", report.recorded.sentence))
    rows.append(("timeline", ", ".join(f"{name} {ms:.0f} ms" for name, ms in report.timeline_ms)))
    why = f", because {report.decision.why}" if report.decision.why else ""
    rows.append(("decided", report.decision.what + why))
    return rows


def _clusters(report: IncidentReport) -> Iterator[StyledLine]:
    if report.clusters:
        yield (("where the ranks were", "bold"),)
    for cluster in report.clusters[:_SHOWN_CLUSTERS]:
        count = len(cluster.ranks)
        ranks = f"{count} rank{'s' * (count > 1)} ({rank_list(cluster.ranks)})"
        yield ((f"  {ranks}: {cluster.place}", ""),)
        for frame in cluster.frames[:_SHOWN_FRAMES]:
            yield ((f"      {frame}", "dim"),)
    if len(report.clusters) > _SHOWN_CLUSTERS:
        yield ((f"  and {len(report.clusters) - _SHOWN_CLUSTERS} more places (--json)", ""),)
    for view in report.views:
        if view.reason and view.reason not in view.place:
            yield ((f"  rank {view.rank}: {view.reason}", "yellow"),)
