"""The plan as a person reads it: what changes, from what to what, why."""

from __future__ import annotations

import sys

from ncclops.cli._output import stdout_console
from ncclops.env.plan import Action, Change, Plan

_ORDER: tuple[Action, ...] = ("unset", "scrub", "set", "keep")
_STYLE = {"unset": "red", "scrub": "yellow", "set": "green", "keep": "dim"}
_ROOM_FOR_ONE_LINE = 120


def print_plan(plan: Plan) -> None:
    """Print the plan: removals first, then what is set, then what stays.

    A wide terminal gets a table; a narrow one two lines a variable; a pipe one line a
    variable, columns separated by two spaces or more, nothing cut.
    """
    rows = sorted(plan.changes, key=lambda change: _ORDER.index(change.action))
    console = stdout_console()
    console.print(_headline(plan), markup=False)
    if not sys.stdout.isatty():
        _print_lines(rows)
    elif console.width >= _ROOM_FOR_ONE_LINE:
        _print_table(rows)
    else:
        _print_stacked(rows)


def first_sentence(reason: str) -> str:
    """The part of a reason that fits a table; the rest is in ``--json`` and ``profile show``."""
    head, dot, _ = reason.partition(". ")
    return head + dot.rstrip() if dot else reason


def transition(change: Change, limit: int = 36) -> str:
    """``before → after``, each shortened in the middle; ``-`` is a variable that is not there."""
    if change.action == "keep":
        return _short(change.before, limit)
    return f"{_short(change.before, limit)} → {_short(change.after, limit)}"


def _short(value: str | None, limit: int) -> str:
    if value is None:
        return "-"
    shown = value.encode("unicode_escape").decode() if not value.isprintable() else value
    half = limit // 2
    return shown if len(shown) <= limit else f"{shown[: half - 1]}…{shown[-half:]}"


def _headline(plan: Plan) -> str:
    counts = [
        f"{number} {action}"
        for action in _ORDER
        if (number := sum(change.action == action for change in plan.changes))
    ]
    return f"{plan.profile}: {', '.join(counts) or 'nothing to change'}"


def _print_lines(rows: list[Change]) -> None:
    cells = [(row.action, row.name, transition(row, 10_000)) for row in rows]
    widths = [min(60, max(map(len, column))) for column in zip(*cells, strict=True)]
    for row, texts in zip(rows, cells, strict=True):
        padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
        sys.stdout.write("  ".join([*padded, first_sentence(row.reason)]) + "\n")


def _print_table(rows: list[Change]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=True)
    table.add_column("", no_wrap=True)
    table.add_column("variable", no_wrap=True)
    table.add_column("before → after", overflow="fold")
    table.add_column("why")
    for row in rows:
        table.add_row(
            Text(row.action, style=_STYLE[row.action]),
            Text(row.name),
            Text(transition(row)),
            Text(first_sentence(row.reason), style="dim" if row.action == "keep" else ""),
        )
    stdout_console().print(table)


def _print_stacked(rows: list[Change]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = stdout_console()
    for row in rows:
        line = Text(row.action.ljust(6), style=_STYLE[row.action])
        line.append(f"{row.name}  ", style="not dim bold" if row.action != "keep" else "")
        line.append(transition(row, 24), style="default")
        console.print(line)
        console.print(Padding(Text(first_sentence(row.reason), style="dim"), (0, 0, 0, 6)))
