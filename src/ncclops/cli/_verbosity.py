"""``-v`` and ``-q``: how much is said on stderr besides the answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from typer.core import TyperOption

# The environment's -v, for programs that start ncclops: a whole number, negative for -q.
VARIABLE = "NCCLOPS_VERBOSE"

_level = 0


def options(quiet: str) -> list[TyperOption]:
    """The two options, for one command; ``quiet`` is the help of ``-q``."""
    return [
        TyperOption(
            param_decls=["-v", "--verbose"],
            type=int,  # without a type the help shows a range
            count=True,
            expose_value=False,
            callback=lambda _context, _parameter, count: louder(count),
            help="Say more on stderr; twice for debugging.",
        ),
        TyperOption(
            param_decls=["-q", "--quiet"],
            is_flag=True,
            default=False,
            expose_value=False,
            callback=lambda _context, _parameter, wanted: quieter(wanted),
            help=quiet,
        ),
    ]


def reset() -> None:
    """Back to what the environment asks for; before a command line is parsed."""
    global _level
    try:
        _level = int(os.environ.get(VARIABLE) or 0)
    except ValueError:
        _level = 0  # not worth refusing a run for


def level() -> int:
    """0 as usual, 1 and more with ``-v``, negative with ``-q``."""
    return _level


def with_logging(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with logging set up before it runs: by then the options have been read."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from ncclops.cli import _logging

        _logging.configure(_level)
        return function(*args, **kwargs)

    return run


def louder(count: int | None) -> int:
    """Callback of ``-v``: how often it was given."""
    global _level
    _level += count or 0
    return count or 0


def quieter(wanted: bool | None) -> bool:
    """Callback of ``-q``: whether it was given."""
    global _level
    _level -= bool(wanted)
    return bool(wanted)
