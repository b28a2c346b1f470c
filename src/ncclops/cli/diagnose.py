"""``ncclops diagnose``: what happened to a run, on one page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import JsonOption, RunArgument
from ncclops.cli._output import print_json, stdout_console

if TYPE_CHECKING:
    from ncclops.diagnose.diagnosis import Diagnosis


def diagnose(
    run: RunArgument = None,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code/--no-exit-code",
            show_default=False,
            help="Exit with 1 when the run has failed or is lost; the default is 0.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Say what happened to a run: where it began, its class and proof, what was tried, what next.

    Joins the verdict, the latest incident, the flight recorders and the classifier on one page.
    For a run under way, ended, or killed.
    """
    from ncclops.diagnose.diagnosis import diagnose as diagnose_run
    from ncclops.record.runs import find

    diagnosis = diagnose_run(find(run).path)
    if as_json:
        print_json(diagnosis.to_json())
    else:
        _print(diagnosis)
    return 1 if exit_code and diagnosis.is_bad else 0


def _print(diagnosis: Diagnosis) -> None:
    from rich.text import Text

    from ncclops.cli._status_table import no_step

    late = diagnosis.without_step
    console = stdout_console()
    state = diagnosis.outcome or {"running": "under way"}.get(diagnosis.state, diagnosis.state)
    style = "bold red" if diagnosis.is_bad else "bold yellow" if late else "bold green"
    console.print(Text(f"run {diagnosis.run_id}: {state}", style=style))
    console.print(Text(diagnosis.what, style="bold"))
    if late:  # a hang shows so long before it is a fault
        console.print(Text(f"but {no_step(late)}", style="bold"))
    for name, text in _rows(diagnosis):
        console.print(Text(f"  {name:<9} ", style="dim") + Text(text, style="not dim"))


def _rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    from ncclops.diagnose import story_text
    from ncclops.diagnose.incident_text import class_row

    for fault in diagnosis.gpu_faults:
        if str(fault) not in diagnosis.what:
            yield "gpu", f"rank {fault.rank}: {fault}"
    recorded = diagnosis.recorded
    if recorded is not None and diagnosis.incident is None and recorded.sentence != diagnosis.what:
        yield "recorders", recorded.sentence
    if diagnosis.story is not None:
        yield from story_text.rows(diagnosis.story)
    elif diagnosis.tried:
        yield "tried", story_text.tried(diagnosis.tried)
    if (report := diagnosis.incident) is not None and diagnosis.recovered:
        yield "incident", f"{report.number}, from which the job recovered: {report.sentence}"
        yield from class_row(report)
    if diagnosis.outcome in ("completed", "no-receipt"):
        yield "receipt", diagnosis.receipt or "none"
    for note in diagnosis.notes:
        yield "note", note
    if diagnosis.story is None or diagnosis.next_command != diagnosis.story.next_command:
        yield "next", story_text.shown(diagnosis.next_command)
