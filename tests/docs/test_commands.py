"""Each `ncclops` command that README and the pages show exists, with the options shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from typer.main import get_command

from ncclops.cli import app
from tests.conftest import REPOSITORY

# docs/cli.md is made of the help texts, and what the changelog names may be gone by now.
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted(set((REPOSITORY / "docs").rglob("*.md")) - {REPOSITORY / "docs" / "cli.md"}),
]
_BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(ncclops [^`\n]+)`")
_PROMPT = re.compile(r"^\s*(?:\w+)?\$\s+")
_ENDS_COMMAND = {"|", "||", "&", "&&", ";", "(", ")", ">", ">>", "<", "2>"}


class Shown(NamedTuple):
    """A command as it is written, and its words after `ncclops`."""

    text: str
    words: list[str]


def shown_in(page: str) -> Iterator[Shown]:
    for match in _BLOCK.finditer(page):
        kind, text = match[1], match[2].replace("\\\n", " ")
        if kind == "python":
            continue
        for line in text.splitlines():
            if kind != "console" or _PROMPT.match(line):
                yield from _commands(_PROMPT.sub("", line))
    for match in _INLINE.finditer(_BLOCK.sub("", page)):
        # A sentence names an option without its value.
        yield from (each for each in _commands(match[1]) if not each.words[-1].startswith("-"))


def _commands(line: str) -> Iterator[Shown]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:  # prose: an apostrophe
        return
    words: list[str] | None = None
    for token in [*tokens, ";"]:
        if token in _ENDS_COMMAND:
            if words:
                yield Shown(line, words)
            words = None
        elif words is not None:
            words.append(token)
        elif token == "ncclops" or token.endswith("/bin/ncclops"):
            words = []


def complaint(words: list[str]) -> str | None:
    """Why the command line would refuse ``words``, as far as names of commands and options go."""
    command: Any = get_command(app)
    context = click.Context(command, info_name="ncclops")
    while isinstance(command, click.Group) or hasattr(command, "list_commands"):
        if not words or words[0].startswith("-") or not words[0].islower():
            return None  # `ncclops --version`, or prose about all commands
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            return f"there is no command {name}"
        command, context = (
            found,
            found.context_class(found, parent=context, info_name=name, **found.context_settings),
        )
    try:
        command.make_parser(context).parse_args(
            [word for word in words if word not in ("…", "...")]
        )
    except Exception as error:  # noqa: BLE001 - of typer's own click or of click itself
        return f"{error}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(REPOSITORY)) for p in PAGES])
def test_commands_and_options_exist(page: Path) -> None:
    wrong = [
        f"{shown.text}\n    {why}"
        for shown in shown_in(page.read_text())
        if (why := complaint(shown.words)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_are_found() -> None:
    found = [shown.words[0] for page in PAGES for shown in shown_in(page.read_text())]
    assert len(found) > 150
    assert {"launch", "classify", "status", "env", "preflight", "flight"} <= set(found)


@pytest.mark.parametrize(
    "line",
    [
        "ncclops lunch train.py",
        "dmesg | ncclops classify - --jsonn",
        "NCCL_DEBUG=INFO ncclops env difff",
        "srun -N 2 ncclops launch --nprocs-per-node 2 train.py",
        "ncclops status --interval",
    ],
)
def test_what_does_not_exist_is_found(line: str) -> None:
    (shown,) = shown_in(f"```sh\n{line}\n```")
    assert complaint(shown.words) is not None
