"""An incident on one page, in lines for people: parts of text, each with a style."""

from __future__ import annotations

from collections.abc import Iterator

from ncclops.classify.model import EXITS, HANGS
from ncclops.diagnose.incident_report import IncidentReport
from ncclops.diagnose.log_evidence import REPORTED
from ncclops.diagnose.own_code import lines_of
from ncclops.diagnose.stacks_text import StyledLine
from ncclops.moments import format_moment
from ncclops.rank_lists import rank_list, ranks_named
from ncclops.stacks.parsing import is_frame

_SHOWN_CLUSTERS = 6
_SHOWN_FRAMES = 4


def incident_lines(report: IncidentReport) -> Iterator[StyledLine]:
    """Who, where, why, what was decided, what to do next."""
    yield ((report.sentence, "bold"),)
    for name, text in _facts(report):
        yield ((f"  {name:<9} ", "dim"), (text, ""))
    for role, text in _evidence(report):
        yield ((f"  {role:<9} {text}", ""),)
    yield from _clusters(report)
    if report.next_steps:
        yield (("what to do next", "bold"),)
        for step in report.next_steps:
            yield ((f"  - {step}", ""),)
    left = "" if report.left_in is None else f"; the ranks left in incident {report.left_in}"
    yield ((f"incident {report.number}: {report.directory}{left}", "dim"),)


def class_row(report: IncidentReport) -> list[tuple[str, str]]:
    """What kind of failure it was, where that is known."""
    if (found := report.classification) is None:
        return []
    return [("class", f"{found['class']} ({found['confidence']:.2g}): {found['summary']}")]


def _facts(report: IncidentReport) -> list[tuple[str, str]]:
    culprit, record = report.culprit, report.record
    rows = [("when", f"{format_moment(record.at)}, in iteration {record.iteration}")]
    rows.append(("culprit", f"{culprit.who}: {culprit.how}"))
    if culprit.frame is not None:
        rows.append(("at", str(culprit.frame)))
    if culprit.callers:
        rows.append(("called", "by " + ", by ".join(map(str, culprit.callers))))
    rows += class_row(report)
    if report.recorded is not None and not report.culprit.by_recorders:
        rows.append(("recorders", report.recorded.sentence))
    rows.append(("timeline", ", ".join(f"{name} {ms:.0f} ms" for name, ms in report.timeline_ms)))
    why = f", because {report.decision.why}" if report.decision.why else ""
    rows.append(("decided", report.decision.what + why))
    return rows


def _evidence(report: IncidentReport) -> Iterator[tuple[str, str]]:
    """Role and text of each line that shows what failed, once: a log has what a rank reports, too.

    Frames of a traceback are left out: "at" and "called" have them.
    """
    shown = set[str]()
    for line in (report.classification or {}).get("evidence", []):
        text, file = line["text"], line["file"]
        if text in shown or (line["role"] != "cause" and (file == REPORTED or is_frame(text))):
            continue
        shown.add(text)
        if file == REPORTED:
            yield line["role"], f"as it reported: {text}"
        elif file in (EXITS, HANGS):
            yield line["role"], text
        else:
            yield line["role"], f"{file}:{line['line']}: {text}"


def _clusters(report: IncidentReport) -> Iterator[StyledLine]:
    if report.clusters:
        yield (("where the ranks were", "bold"),)
    for cluster in report.clusters[:_SHOWN_CLUSTERS]:
        count = len(cluster.ranks)
        ranks = f"{count} rank{'s' * (count > 1)} ({rank_list(cluster.ranks)})"
        yield ((f"  {ranks}: {cluster.place}", ""),)
        for line in lines_of(cluster.frames)[:_SHOWN_FRAMES]:
            yield ((f"      {line}", "dim"),)
    if len(report.clusters) > _SHOWN_CLUSTERS:
        yield ((f"  and {len(report.clusters) - _SHOWN_CLUSTERS} more places (--json)", ""),)
    reasons: dict[str, list[int]] = {}
    for view in report.views:
        if view.reason and view.reason not in view.place:
            reasons.setdefault(view.reason, []).append(view.rank)
    for reason, missing in reasons.items():
        yield ((f"  {ranks_named(missing)}: {reason}", "yellow"),)
