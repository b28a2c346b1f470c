"""``ncclops stacks``: what each rank of a running job is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import JsonOption, LiveRunArgument
from ncclops.cli._output import print_json, stdout_console

if TYPE_CHECKING:
    from ncclops.diagnose.places import Cluster, RankView
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
        str, typer.Option("--limit", help="How long to wait for the ranks, such as 5s.")
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

    console = stdout_console()
    views = {view.rank: view for view in seen.views}
    odd_one_out = len(seen.clusters) > 1
    for number, cluster in enumerate(seen.clusters):
        style = "bold red" if odd_one_out and number > 0 else "bold"
        console.print(Text(_headline(cluster), style=style))
        for line in _last_operations([views[rank] for rank in cluster.ranks]):
            console.print(Text(f"    {line}"))
        for frame in cluster.shown_frames:
            console.print(Text(f"      {frame}", style="dim"))
    for rank, reason in seen.collected.reasons.items():
        console.print(Text(f"rank {rank} did not answer: {reason}", style="yellow"))
    console.print(Text(f"snapshots: {seen.collected.directory}", style="dim"))


def _headline(cluster: Cluster) -> str:
    from ncclops.rank_lists import rank_list

    count = len(cluster.ranks)
    ranks = f"{count} ranks ({rank_list(cluster.ranks)})" if count > 1 else ""
    return f"{ranks or f'rank {cluster.ranks[0]}'}: {cluster.place}"


def _last_operations(views: list[RankView]) -> list[str]:
    """What the ranks entered last, ranks with the same answer together."""
    from ncclops.diagnose.places import describe_operation
    from ncclops.rank_lists import rank_list

    said: dict[str, list[int]] = {}
    for view in views:
        if view.last is not None:
            pending = ", not completed" if view.last.pending else ""
            said.setdefault(f"last entered {describe_operation(view.last)}{pending}", []).append(
                view.rank
            )
    one = len(said) == 1
    return [text if one else f"ranks {rank_list(ranks)}: {text}" for text, ranks in said.items()]
