"""``ncclops receipt``: whether a run has shown what makes it healthy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import ExitCodeOption, JsonOption, run_or_path
from ncclops.cli._output import print_json, stdout_console

if TYPE_CHECKING:
    from ncclops.receipts.judge import Receipt

app = typer.Typer(no_args_is_help=True, help="Judge runs by their receipts.")


@app.callback()
def _group() -> None:
    """Judge runs by their receipts."""


@app.command()
def check(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|FILE]",
            help="A run (directory, id or its beginning), a log or a receipt.jsonl; default: the"
            " newest run in runs/.",
        ),
    ] = None,
    exit_code: ExitCodeOption = True,
    as_json: JsonOption = False,
) -> int:
    """Judge a log or a run by the five rules of liveness; exit 0 when it is healthy, else 1."""
    from ncclops.receipts.judge import judge
    from ncclops.receipts.sources import load

    receipt = judge(load(run_or_path(path)))
    if as_json:
        print_json(receipt.to_json())
    else:
        _print(receipt)
    return 1 if exit_code and receipt.verdict != "healthy" else 0


def _print(receipt: Receipt) -> None:
    from rich.text import Text

    from ncclops.receipts.judge import MEANING

    console = stdout_console()
    good = receipt.verdict == "healthy"
    console.print(
        Text(receipt.verdict, style="bold green" if good else "bold red")
        + Text(f": {MEANING[receipt.verdict]}", style="not bold")
    )
    for rule in receipt.rules:
        mark = Text("ok    ", style="green") if rule.ok else Text("broken", style="red")
        console.print(Text("  ") + mark + Text(f"  {rule.rule}: {rule.note}"))
        if rule.evidence is not None:
            console.print(Text(f"          {rule.evidence}", style="dim"))
    if numbers := _numbers(receipt):
        console.print(Text(f"  {numbers}"))


def _numbers(receipt: Receipt) -> str:
    facts = receipt.facts
    said = [f"{facts.steps} step{'s' * (facts.steps != 1)} reported"]
    if facts.first_real_step is not None:
        said.append(f"the first that counts is {facts.first_real_step}")
    if facts.warmup_seconds is not None:
        said.append(f"compile warm-up {facts.warmup_seconds:.1f}s")
    if facts.steady_rate is not None:
        said.append(f"steady {facts.steady_rate:,.5g} {facts.rate_unit}")
    if facts.peak_gib is not None:
        said.append(f"peak memory {facts.peak_gib:.2f} GiB")
    return ", ".join(said)
