"""The plan as a person reads it: what changes, from what to what, why."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ncclops.cli._output import echo, stdout_console
from ncclops.env.plan import Action, Change, Plan

_ORDER: tuple[Action, ...] = ("unset", "scrub", "set", "keep")
_STYLE = {"unset": "red", "scrub": "yellow", "set": "green", "keep": "dim"}
_ROOM_FOR_ONE_LINE = 150


def print_plan(plan: Plan, origins: Mapping[str, str] | None = None) -> None:
    """Print the plan: removals first, then what is set, then what stays.

    ``origins`` says of some variables who exported them.
    A wide terminal gets a table; a narrow one the reason on a line of its own; a pipe one line
    a variable, columns separated by two spaces or more, nothing cut.
    """
    origins = origins or {}
    rows = sorted(plan.changes, key=lambda change: _ORDER.index(change.action))
    console = stdout_console()
    console.print(_headline(plan), markup=False)
    if not sys.stdout.isatty():
        _print_lines(rows, origins)
    elif console.width >= _ROOM_FOR_ONE_LINE:
        _print_table(rows, origins)
    else:
        _print_stacked(rows, origins, console.width)


def print_files(added: list[dict[str, str]]) -> None:
    """Print what NCCL adds from its configuration files, which no plan takes away."""
    for setting in added:
        echo(f"file  {setting['name']}  {setting['value']}  NCCL adds it from {setting['source']}")


def print_inherited(found: list[dict[str, str]]) -> None:
    """Print what the shell has left on that reaches the workers."""
    for setting in found:
        text = f"{setting['message'].rstrip('.')}; {setting['remedy']}"
        echo(f"inherited  {setting['name']}  {setting['value']}  {text}")


def first_sentence(reason: str) -> str:
    """The part of a reason that fits a table; the rest is in ``--json`` and ``profile show``."""
    head, dot, _ = reason.partition(". ")
    return head + dot.rstrip() if dot else reason


def _why(row: Change, origins: Mapping[str, str]) -> str:
    """The reason in a sentence, and where the value that is in the way came from."""
    sentence = first_sentence(row.reason)
    return f"{sentence} From {origins[row.name]}." if row.name in origins else sentence


def transition(change: Change, room: int | None = None) -> str:
    """``before → after`` within ``room`` characters, ``-`` for a variable that is not there.

    A scrubbed path list shows what it loses, which is what one looks for.
    """
    if change.action == "keep":
        return _short(change.before, room)
    if change.action == "scrub" and room is not None:
        kept = (change.after or "").split(":")
        lost = [entry for entry in (change.before or "").split(":") if entry not in kept]
        return _short(f"minus {':'.join(lost)}", room)
    if change.before is None:
        return f"- → {_short(change.after, room and room - 4)}"
    half = None if room is None else (room - 3) // 2
    return f"{_short(change.before, half)} → {_short(change.after, half)}"


def _short(value: str | None, limit: int | None) -> str:
    if value is None:
        return "-"
    shown = value if value.isprintable() else value.encode("unicode_escape").decode("ascii")
    if limit is None or len(shown) <= limit:
        return shown
    head = max(1, limit // 2 - 1)
    return f"{shown[:head]}…{shown[len(shown) - max(1, limit - head - 1) :]}"


def _headline(plan: Plan) -> str:
    counts = [
        f"{number} {action}"
        for action in _ORDER
        if (number := sum(change.action == action for change in plan.changes))
    ]
    return f"{plan.profile}: {', '.join(counts) or 'nothing to change'}"


def _print_lines(rows: list[Change], origins: Mapping[str, str]) -> None:
    cells = [(row.action, row.name, transition(row)) for row in rows]
    widths = [min(60, max(map(len, column))) for column in zip(*cells, strict=True)]
    for row, texts in zip(rows, cells, strict=True):
        padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
        echo("  ".join([*padded, _why(row, origins)]))


def _print_table(rows: list[Change], origins: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for wraps in (False, False, False, True):
        table.add_column(no_wrap=not wraps)
    for row in rows:
        table.add_row(
            Text(row.action, style=_STYLE[row.action]),
            Text(row.name),
            Text(transition(row, 40)),
            Text(_why(row, origins), style="dim"),
        )
    stdout_console().print(table)


def _print_stacked(rows: list[Change], origins: Mapping[str, str], width: int) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = stdout_console()
    widest = max((len(row.name) for row in rows), default=0)
    room = max(12, width - widest - 8)
    for row in rows:
        line = Text(row.action.ljust(6), style=_STYLE[row.action])
        line.append(f"{row.name.ljust(widest)}  {transition(row, room)}", style="default")
        console.print(line)
        console.print(Padding(Text(_why(row, origins), style="dim"), (0, 0, 0, 6)))
