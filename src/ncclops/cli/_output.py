"""How commands print: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from ncclops.cli import _verbosity

if TYPE_CHECKING:
    from rich.console import Console


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document, and nothing else, on stdout."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def stdout_console() -> Console:
    """A console for the answer itself; plain and unwrapped when stdout is no terminal."""
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False)


def warn(message: str) -> None:
    """One line for the person at the terminal, on stderr, however little is to be said."""
    sys.stderr.write(f"ncclops: {message}\n")


def note(message: str) -> None:
    """The same, but not with ``-q``."""
    if _verbosity.level() >= 0:
        warn(message)
