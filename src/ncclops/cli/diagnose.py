"""``ncclops diagnose``: what happened to a run, on one page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import JsonOption, RunArgument
from ncclops.cli._output import print_json, stdout_console

if TYPE_CHECKING:
    from ncclops.diagnose.diagnosis import Diagnosis

_SHOWN_STEPS = 6
_SHOWN_LINES = 3
_SHOWN_CHARS = 160


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

    console = stdout_console()
    state = diagnosis.outcome or {"running": "under way"}.get(diagnosis.state, diagnosis.state)
    style = "bold red" if diagnosis.is_bad else "bold green"
    console.print(Text(f"run {diagnosis.run_id}: {state}", style=style))
    console.print(Text(diagnosis.what, style="bold"))
    for name, text in _rows(diagnosis):
        console.print(Text(f"  {name:<9} ", style="dim") + Text(text, style="not dim"))
    if diagnosis.next_steps:
        console.print(Text("what to do next", style="bold"))
    for step in diagnosis.next_steps:
        console.print(Text(f"  - {step}"))
    console.print(Text(f"more: {diagnosis.next_command}", style="dim"))


def _rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    if diagnosis.rank is not None:
        host = f" on {diagnosis.host}" if diagnosis.host else ""
        yield "rank", f"{diagnosis.rank}{host}"
    if diagnosis.frame is not None:
        yield "line", str(diagnosis.frame)
    if diagnosis.operation is not None:
        yield "operation", f"{diagnosis.operation}, the last that this rank entered"
    if (found := diagnosis.classification) is not None:
        yield "class", f"{found['class']} ({found['confidence']:.2g}): {found['summary']}"
        for line in found.get("evidence", [])[:_SHOWN_LINES]:
            yield "proof", f"{line['file']}:{line['line']}: {line['text'][:_SHOWN_CHARS]}"
        word = "may be retried" if found["retry"]["eligible"] else "not retried"
        yield "retry", f"{word} ({found['retry']['policy']}): {found['retry']['reason']}"
    recorded = diagnosis.recorded
    if recorded is not None and not diagnosis.recovered and recorded.sentence not in diagnosis.what:
        yield "recorders", recorded.sentence
    left_out = len(diagnosis.tried) - _SHOWN_STEPS
    if left_out > 0:
        yield "tried", f"{left_out} steps before these (--json has all)"
    for step in diagnosis.tried[-_SHOWN_STEPS:]:
        yield "tried", f"{step.what}: {step.why}" if step.why else step.what
    if diagnosis.reason and diagnosis.reason not in diagnosis.what:
        yield "verdict", diagnosis.reason
    if (report := diagnosis.incident) is not None and diagnosis.recovered:
        yield "incident", f"{report.number}, from which the job recovered: {report.sentence}"
    if diagnosis.outcome in ("completed", "no-receipt"):
        yield "receipt", diagnosis.receipt or "none"
    for note in diagnosis.notes:
        yield "note", note
