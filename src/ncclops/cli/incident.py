"""``ncclops incident``: what happened, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import JsonOption, RunArgument
from ncclops.cli._output import print_json, stdout_console

if TYPE_CHECKING:
    from rich.console import Console

    from ncclops.diagnose.incident_report import IncidentReport

_SHOWN_CLUSTERS = 6
_SHOWN_FRAMES = 4


def incident(
    run: RunArgument = None,
    number: Annotated[
        int | None, typer.Argument(metavar="[N]", help="Which incident; default the latest.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Explain one incident: who, where, why, what was decided, what to do next."""
    from ncclops.diagnose.incident_report import report_incident

    report = report_incident(_directory(run), number)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    return 0


def _directory(run: str | None) -> Path:
    """Where the incidents lie: in a run, or where a program that wraps itself has put them."""
    from ncclops.record.paths import RunPaths
    from ncclops.record.runs import find

    if run is not None and RunPaths(Path(run)).incidents.is_dir():
        return Path(run)
    return find(run).path


def _print(report: IncidentReport) -> None:
    from rich.text import Text

    console = stdout_console()
    console.print(Text(report.sentence, style="bold"))
    _print_rows(console, _facts(report))
    _print_evidence(console, report)
    _print_clusters(console, report)
    if report.next_steps:
        console.print(Text("what to do next", style="bold"))
        for step in report.next_steps:
            console.print(Text(f"  - {step}"))
    left = "" if report.left_in is None else f"; the ranks left in incident {report.left_in}"
    console.print(Text(f"incident {report.number}: {report.directory}{left}", style="dim"))


def _facts(report: IncidentReport) -> list[tuple[str, str]]:
    from ncclops.moments import format_moment

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


def _print_rows(console: Console, rows: list[tuple[str, str]]) -> None:
    from rich.text import Text

    for name, text in rows:
        console.print(Text(f"  {name:<9} ", style="dim") + Text(text, style="not dim"))


def _print_evidence(console: Console, report: IncidentReport) -> None:
    from rich.text import Text

    for line in (report.classification or {}).get("evidence", []):
        console.print(Text(f"  {line['role']:<9} {line['file']}:{line['line']}: {line['text']}"))


def _print_clusters(console: Console, report: IncidentReport) -> None:
    from rich.text import Text

    from ncclops.rank_lists import rank_list

    if report.clusters:
        console.print(Text("where the ranks were", style="bold"))
    for cluster in report.clusters[:_SHOWN_CLUSTERS]:
        count = len(cluster.ranks)
        ranks = f"{count} rank{'s' * (count > 1)} ({rank_list(cluster.ranks)})"
        console.print(Text(f"  {ranks}: {cluster.place}"))
        for frame in cluster.frames[:_SHOWN_FRAMES]:
            console.print(Text(f"      {frame}", style="dim"))
    if len(report.clusters) > _SHOWN_CLUSTERS:
        console.print(Text(f"  and {len(report.clusters) - _SHOWN_CLUSTERS} more places (--json)"))
    for view in report.views:
        if view.reason and view.reason not in view.place:
            console.print(Text(f"  rank {view.rank}: {view.reason}", style="yellow"))
