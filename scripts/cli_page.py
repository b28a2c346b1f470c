#!/usr/bin/env python3
"""Writes docs/cli.md from the help texts of all commands.

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

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = """\
# Commands

<!-- Written by scripts/cli_page.py from the help texts: edit them. -->

What `--help` says of each command. Exit codes are in [contracts.md](contracts.md#exit-codes).
"""
_WIDTH = 96


def page() -> str:
    """The whole page."""
    table = get_command(app)
    assert isinstance(table, CommandTable)
    parts = [HEAD]
    for each in COMMANDS:
        if not each.old_name:
            command = table.get_command(None, each.name)
            parts += _sections(command, click.Context(click.Group("ncclops"), info_name="ncclops"))
    return "\n".join(parts)


def _sections(command: Any, parent: click.Context) -> Iterator[str]:
    context = command.context_class(
        command, parent=parent, info_name=command.name, terminal_width=_WIDTH
    )
    level = "#" * len(context.command_path.split())
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield f"{level} {context.command_path}\n\n```text\n{text}\n```\n"
    for part in getattr(command, "commands", {}).values():
        yield from _sections(part, context)


if __name__ == "__main__":
    PAGE.write_text(page())
