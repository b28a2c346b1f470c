"""``ncclops runs``: the runs below a directory, how they ended and why."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import JsonOption
from ncclops.cli._output import echo, note, print_json, stdout_console
from ncclops.errors import UsageError
from ncclops.plain_text import plain_line

if TYPE_CHECKING:
    from ncclops.status.run_list import RunLine

_HEAD = ("run", "started", "outcome", "took", "good", "cause")
_LIMIT = 50
_MOST_CHARS = 1000  # of a name


def runs(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]…", help="Where to look, at any depth. Default: runs."),
    ] = None,
    failed: Annotated[
        bool,
        typer.Option(
            "--failed", help="Only those that failed, have no receipt, are lost or unreadable."
        ),
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only those started since then: 12h, 7d, or a date as in 2026-11-20.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many at most; 0 for all.")
    ] = _LIMIT,
    as_json: JsonOption = False,
) -> None:
    """List the runs below a directory, the newest first: outcome, duration, goodput and cause.

    Reads no more of each than that needs. On a terminal a line is as wide as the terminal, in a
    pipe or a file as long as it has to be.
    """
    from ncclops.record.paths import DEFAULT_PARENT
    from ncclops.status.run_list import list_runs

    asked = directories or [DEFAULT_PARENT]
    begin = None if since is None else _moment(since)
    found: list[RunLine] = []
    try:
        lines = (line for line in list_runs(asked, since=begin) if line.is_bad or not failed)
        found = list(lines if limit == 0 else islice(lines, limit + 1))
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}: name a directory that has runs below it"
        ) from None
    more = bool(limit) and len(found) > limit
    shown = found[:limit] if limit else found
    if as_json:
        listed = [line.to_json() for line in shown]
        print_json({"schema": "ncclops.runs/1", "runs": listed, "more": more})
        return
    if not shown:
        where = ", ".join(map(str, asked))
        note(f"no {'failed ' * failed}runs in or below {where}{f' since {since}' * bool(since)}")
        return
    _print([_HEAD, *(_cells(line, asked) for line in shown)], [line.is_bad for line in shown])
    if more:
        note(f"there are older ones: --limit 0 shows all, --limit N more than {limit}")


def _moment(text: str) -> float:
    """What ``--since`` means, in seconds since the epoch. Raises ``UsageError``."""
    from datetime import datetime

    from ncclops.durations import parse_duration

    try:
        return time.time() - parse_duration(text).total_seconds()
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {text[:80]}: write a duration, as in 12h or 7d, or a date, as in 2026-11-20"
            " or 2026-11-20T08:00"
        ) from None


def _cells(line: RunLine, asked: Sequence[Path]) -> tuple[str, ...]:
    from ncclops.classify.model import NO_FAILURE_SEEN
    from ncclops.diagnose.story_text import shown

    cause = shown(line.cause)
    if line.failure_class not in (None, NO_FAILURE_SEEN) and line.outcome == "failed":
        cause = f"{line.failure_class}: {cause}"
    return (
        _name(line.path, asked),
        _started(line.started),
        line.outcome or line.state,
        _took(line.seconds),
        "-" if line.goodput is None else f"{line.goodput:.0%}",
        cause,
    )


def _name(path: Path, asked: Sequence[Path]) -> str:
    """As the directory that was asked about has it; the whole where there are several."""
    if len(asked) > 1:
        return plain_line(str(path), _MOST_CHARS)
    relative = path.relative_to(asked[0])
    return plain_line(str(relative) if relative.name else path.name or str(path), _MOST_CHARS)


def _started(seconds: float | None) -> str:
    from datetime import datetime

    try:
        return "-" if seconds is None else f"{datetime.fromtimestamp(seconds):%m-%d %H:%M}"
    except (OverflowError, ValueError, OSError):
        return "?"


def _took(seconds: float | None) -> str:
    """In the two largest units: ``3.2s``, ``4m10s``, ``2h05m``, ``6d11h``."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s"
    for size, unit, part, below in ((3600, "m", 1, "s"), (86400, "h", 60, "m")):
        if seconds < size:
            small = 60 * part
            return f"{seconds // small:.0f}{unit}{seconds % small // part:02.0f}{below}"
    return f"{seconds // 86400:.0f}d{seconds % 86400 // 3600:02.0f}h"


def _print(rows: Sequence[tuple[str, ...]], bad: Sequence[bool]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    if not sys.stdout.isatty():
        for row in rows:
            echo(_joined(row, widths))
        return
    from rich.text import Text

    console = stdout_console()
    # Names that a person has chosen may be long; the cause needs some room all the same.
    widths[0] = min(widths[0], max(22, console.width - sum(widths[1:]) - 2 * len(widths) - 24))
    for row, style in zip(rows, ["bold", *("red" if each else "" for each in bad)], strict=True):
        line = Text(_joined(row, widths), style=style)
        line.truncate(console.width, overflow="ellipsis")
        console.print(line)


def _joined(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        (cell if len(cell) <= width else f"{cell[: width - 1]}…").ljust(width)
        for cell, width in zip(row[:-1], widths, strict=True)
    ]
    return "  ".join([*cells, " ".join(row[-1].split())]).rstrip()
