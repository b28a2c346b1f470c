"""``ncclops stacks``: what each rank of a running job is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import JsonOption, LiveRunArgument
from ncclops.cli._output import print_json, stdout_console

if TYPE_CHECKING:
    from ncclops.diagnose.where import Look


def stacks(
    run: LiveRunArgument = None,
    native: Annotated[
        bool,
        typer.Option(
            "--native",
            help="Native stacks of all ranks by py-spy, which halts each for a moment."
            " Ranks that do not answer get them anyway.",
        ),
    ] = False,
    limit: Annotated[
        str,
        typer.Option("--limit", metavar="TIME", help="How long to wait for the ranks, such as 5s."),
    ] = "5s",
    as_json: JsonOption = False,
) -> int:
    """Show the stacks of all ranks of a running job, without stopping it.

    Ranks with the same stack are shown together, the largest group first.
    """
    from ncclops.diagnose.where import look
    from ncclops.durations import parse_duration
    from ncclops.errors import UsageError
    from ncclops.record.runs import find

    try:
        patience = parse_duration(limit)
    except ValueError as error:
        raise UsageError(f"--limit {limit}: {error}") from error
    seen = look(
        find(run, live_only=True).path, limit=patience, native="all" if native else "silent"
    )
    if as_json:
        print_json(seen.to_json())
    else:
        _print(seen)
    return 0


def _print(seen: Look) -> None:
    from rich.text import Text

    from ncclops.diagnose.stacks_text import stack_lines

    console = stdout_console()
    for line in stack_lines(seen):
        console.print(Text.assemble(*line))
