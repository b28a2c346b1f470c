#!/usr/bin/env python3
"""Writes docs/man/ncclops.1 from the help texts of all commands; the wheel has it as share/man.

A test holds the page equal to what is written here; run this after changing an option.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from typer.main import get_command

from ncclops.cli import app
from ncclops.cli._commands import COMMANDS, CommandTable
from ncclops.cli._exit_codes import TABLE

PAGE = Path(__file__).parent.parent / "docs" / "man" / "ncclops.1"


def page() -> str:
    """The whole page, in roff with the macros of man(7)."""
    table = get_command(app)
    assert isinstance(table, CommandTable)
    root = click.Context(click.Group("ncclops"), info_name="ncclops")
    help_text = table.help or ""
    lines = [
        '.\\" Written by scripts/man_page.py from the help texts: edit them.',
        '.TH NCCLOPS 1 "" "ncclops" "User Commands"',
        ".SH NAME",
        f"ncclops \\- {_text(_lower(help_text.rstrip('.')))}",
        ".SH SYNOPSIS",
        ".B ncclops",
        "[\\fIOPTIONS\\fR] \\fICOMMAND\\fR [\\fIARGUMENTS\\fR]",
        ".SH DESCRIPTION",
        _text(" ".join((table.epilog or "").split())),
        ".SH OPTIONS",
        *_options(table, table.context_class(table, info_name="ncclops")),
        ".SH COMMANDS",
    ]
    for each in COMMANDS:
        if not each.old_name:
            lines += _command(table.get_command(None, each.name), root)
    lines += [".SH EXIT STATUS", *_exit_status()]
    lines += [
        ".SH FILES",
        *_term(
            "runs/<run id>/", "A run: its record, logs and verdict, unless --run-dir says else."
        ),
        *_term("~/.config/ncclops/profiles/", "Launch profiles of the user."),
        *_term("/etc/ncclops/profiles/", "Launch profiles of the site."),
        *_term("~/.cache/ncclops/", "What classify keeps for its next call."),
        ".SH SEE ALSO",
        "torchrun, and the pages of docs/ in the source.",
    ]
    return "\n".join(lines) + "\n"


def _command(command: Any, parent: Any) -> Iterator[str]:
    context = command.context_class(command, parent=parent, info_name=command.name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f".SS {_quoted(f'{context.command_path} {usage}')}"
    paragraphs = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    yield "\n.PP\n".join(map(_text, paragraphs))
    yield from _options(command, context)
    for part in getattr(command, "commands", {}).values():
        yield from _command(part, context)


def _options(command: Any, context: Any) -> Iterator[str]:
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None and "--help" not in record[0]:
            yield from _term(*record)


def _exit_status() -> Iterator[str]:
    for row in TABLE:
        meanings = {"0": row.worked, "1": row.bad, "2": row.usage, "others": row.others}
        told = "; ".join(f"{code}: {what}" for code, what in meanings.items() if what)
        yield from _term(row.command.strip("`"), f"{told.replace('`', '')}.")


def _term(term: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield f".B {_text(term)}"
    yield _text(" ".join(text.split()))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _quoted(text: str) -> str:
    return f'"{_text(text)}"'


def _text(text: str) -> str:
    """``text`` so that roff shows it as it is."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    plain = plain.replace('"', "\\(dq").replace("…", "...").replace("→", "\\(->")
    return f"\\&{plain}" if plain.startswith(".") else plain


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
