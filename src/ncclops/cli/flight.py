"""`ncclops flight`: which rank hung first, where and why, from flight-recorder dumps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import ExitCodeOption, run_or_path
from ncclops.cli._output import note, print_json, stdout_console

if TYPE_CHECKING:
    from rich.console import Console

    from ncclops.flight.analysis_context import FlightFinding
    from ncclops.flight.report import FlightReport

_SHOWN_GROUPS = 20
_SHOWN_FRAMES = 4
_SHOWN_SIDES = 6
_SHOWN_TORCH_LINES = 20

app = typer.Typer(no_args_is_help=True, help="Read flight-recorder dumps of a hang.")


@app.callback()
def _group() -> None:
    """Read flight-recorder dumps of a hang."""


@app.command()
def analyze(
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|PATH]",
            help="A run, an incident, a folder of dumps, or one dump; default: the newest run in"
            " runs/.",
        ),
    ] = None,
    exit_code: ExitCodeOption = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print ncclops.flight/1.")] = False,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="PATTERN",
            help="Only groups whose name or description matches, as in a shell.",
            show_default=False,
        ),
    ] = None,
    ras: Annotated[
        str | None,
        typer.Option(
            "--ras",
            metavar="HOST:PORT",
            help="Also ask NCCL's RAS service of the job, which still runs: localhost:28028.",
            show_default=False,
        ),
    ] = None,
    with_torch: Annotated[
        bool, typer.Option("--with-torch", help="Also ask torch's own analyser. Imports torch.")
    ] = False,
) -> int:
    """Say which rank hung first, where and why; exit 1 when something is wrong.

    Dumps are pickles or JSON of any torch since 2.5, whatever they are called; some ranks may be
    missing. Nothing in them is executed.
    """
    from ncclops.flight import analyze as analyze_path

    report = analyze_path(run_or_path(directory), group, ras_address=ras, with_torch=with_torch)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    for file, reason in report.evidence.skipped:
        note(f"left out {file}: {reason}")
    return 1 if exit_code and report.is_bad else 0


def _print(report: FlightReport) -> None:
    from rich.text import Text

    console = stdout_console()
    style = "bold red" if report.is_bad else "bold green"
    console.print(Text(report.sentence, style=style))
    for number, finding in enumerate(report.findings):
        if number:
            console.print()
            console.print(Text(f"also: {report.sentence_of(finding)}", style="bold"))
        _print_finding(console, finding)
    console.print()
    _print_groups(console, report)
    for line in [*report.notes, *_torch_lines(report)]:
        console.print(Text(f"note: {line}", style="dim"))


def _torch_lines(report: FlightReport) -> list[str]:
    opinion = report.extra.get("torch")
    if opinion is None:
        return []
    if not opinion["ok"]:
        return [f"torch's analyser failed: {opinion['problem']}"]
    said = opinion["says"] or ["nothing wrong"]
    return ["torch's analyser says:", *said[:_SHOWN_TORCH_LINES]]


def _print_finding(console: Console, finding: FlightFinding) -> None:
    from rich.text import Text

    from ncclops.rank_lists import ranks_named

    culprits = ranks_named(finding.culprits) if finding.culprits else "no single rank"
    console.print(
        Text(f"  {finding.kind}, culprit: {culprits}, confidence {finding.confidence:.2f}")
    )
    for side in finding.sides[:_SHOWN_SIDES]:
        console.print(Text(f"  {side.role:8} {ranks_named(side.ranks)}: {side.doing}"))
        for frame in side.frames[:_SHOWN_FRAMES]:
            console.print(Text(f"             {frame.file}:{frame.line} {frame.function}", "dim"))
    if len(finding.sides) > _SHOWN_SIDES:
        console.print(Text(f"  and {len(finding.sides) - _SHOWN_SIDES} more: --json has all"))


def _print_groups(console: Console, report: FlightReport) -> None:
    from rich.table import Table

    from ncclops.rank_lists import rank_list

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("group", "ranks", "last", "entered", "not entered", "pending"):
        table.add_column(title, overflow="fold")
    for group in report.groups[:_SHOWN_GROUPS]:
        row = report.group_json(group)
        unknown = f" unknown: {rank_list(row['unknown'])}" if row["unknown"] else ""
        table.add_row(
            str(group.name),
            rank_list(group.members) + ("?" if row["ranks_inferred"] else ""),
            f"#{row['last_seq']} {row['last_op'] or ''}",
            rank_list(row["entered"]),
            rank_list(row["not_entered"]) + unknown,
            rank_list(row["pending"]),
        )
    console.print(table)
    if len(report.groups) > _SHOWN_GROUPS:
        console.print(f"and {len(report.groups) - _SHOWN_GROUPS} more groups: --json has all")
