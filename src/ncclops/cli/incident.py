"""``ncclops incident``: what happened, on one page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import JsonOption, RunArgument
from ncclops.cli._output import print_json, stdout_console

if TYPE_CHECKING:
    from ncclops.diagnose.incident_report import IncidentReport

# An id begins with the year.
_A_NUMBER = re.compile("[0-9]{1,3}")


def incident(
    run: RunArgument = None,
    number: Annotated[
        int | None, typer.Argument(metavar="[N]", help="Which incident; default the latest.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Explain one incident: who, where, why, what was decided, what to do next.

    A number alone is an incident of the newest run.
    """
    from ncclops.diagnose.incident_report import report_incident

    if run is not None and number is None and _A_NUMBER.fullmatch(run) and not Path(run).exists():
        number, run = int(run), None
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

    from ncclops.diagnose.incident_text import incident_lines

    console = stdout_console()
    for line in incident_lines(report):
        console.print(Text.assemble(*line))
