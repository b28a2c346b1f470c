"""How commands print: data on stdout, everything else on stderr.

All that a command shows goes through here, so that nothing which came from a log, a dump or a
record acts on the terminal (``ncclops.plain_text``). JSON and shell code are written as they are.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ncclops.cli import _verbosity
from ncclops.plain_text import plain

if TYPE_CHECKING:
    from rich.console import Console


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document, and nothing else, on stdout."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def echo(text: str, *, newline: bool = True) -> None:
    """Print lines of the answer on stdout."""
    sys.stdout.write(plain(text) + "\n" * newline)


def stdout_console() -> Console:
    """A console for the answer itself; plain and unwrapped when stdout is no terminal."""
    from ncclops.cli._console import PlainConsole

    return PlainConsole(soft_wrap=not sys.stdout.isatty(), highlight=False)


def warn(message: str) -> None:
    """One line for the person at the terminal, on stderr, however little is to be said."""
    tell(f"ncclops: {plain(message)}\n")


def tell(lines: str) -> None:
    """Write whole lines on stderr, where it takes them: a full disk below it, or a reader that has
    gone, ends no command, least of all a run."""
    with suppress(OSError):
        sys.stderr.write(lines)


def note(message: str) -> None:
    """The same, but not with ``-q``."""
    if _verbosity.level() >= 0:
        warn(message)
