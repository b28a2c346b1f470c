"""``ncclops receipt``: whether a run has shown what makes it healthy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import ExitCodeOption, JsonOption, run_or_path
from ncclops.cli._output import print_json, stdout_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ncclops.receipts.comparing import Figure
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


@app.command("compare")
def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A run, a log or a receipt.jsonl.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same, of the run to compare with it.")],
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code/--no-exit-code",
            show_default=False,
            help="Exit with 1 when a figure swings or a run is not healthy; the default is 0.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Show rate, warm-up and peak memory of two runs side by side, and flag what swings.

    A rate counts only where all five rules carry it.
    """
    from ncclops.receipts.comparing import compare
    from ncclops.receipts.judge import judge
    from ncclops.receipts.sources import load

    receipts = [judge(load(run_or_path(name))) for name in (a, b)]
    figures = compare(*receipts)
    if as_json:
        runs = {
            side: {"name": name, "verdict": receipt.verdict}
            for side, name, receipt in zip("ab", (a, b), receipts, strict=True)
        }
        rows = [figure.to_json() for figure in figures]
        print_json({"schema": "ncclops.receipt-compare/1", **runs, "figures": rows})
    else:
        _print_figures((a, b), receipts, figures)
    bad = any(figure.swings for figure in figures)
    bad |= any(receipt.verdict != "healthy" for receipt in receipts)
    return 1 if exit_code and bad else 0


def _print_figures(
    names: tuple[str, str], receipts: Sequence[Receipt], figures: Sequence[Figure]
) -> None:
    from rich.text import Text

    console = stdout_console()
    for letter, name, receipt in zip("AB", names, receipts, strict=True):
        console.print(Text(f"{letter}: {name}: {receipt.verdict}: {receipt.meaning}"))
    for figure in figures:
        a, b = ("-" if value is None else f"{value:,.5g}" for value in (figure.a, figure.b))
        ratio = "" if figure.ratio is None else f", {figure.ratio:.2f} times"
        swing = "  SWING" if figure.swings else ""
        note = f"  ({figure.note})" if figure.note else ""
        console.print(
            Text(f"  {figure.name:<12} {a} -> {b} {figure.unit}{ratio}{swing}{note}".rstrip()),
            style="bold red" if figure.swings else None,
        )


def _print(receipt: Receipt) -> None:
    from rich.text import Text

    console = stdout_console()
    good = receipt.verdict == "healthy"
    console.print(
        Text(receipt.verdict, style="bold green" if good else "bold red")
        + Text(f": {receipt.meaning}", style="not bold")
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
    if receipt.steady_rate is not None:
        said.append(f"steady {receipt.steady_rate:,.5g} {receipt.rate_unit}")
    if facts.peak_gib is not None:
        said.append(f"peak memory {facts.peak_gib:.2f} GiB")
    return ", ".join(said)
