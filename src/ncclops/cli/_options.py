"""Options and arguments that several commands have, and how fixed sets of values are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ncclops.errors import UsageError
from ncclops.nearest import nearest

# As in ncclops.profiles, which takes longer to import than most commands run.
RestartMode = Literal["in-process", "process", "none"]
RESTART_MODES: tuple[RestartMode, ...] = ("in-process", "process", "none")
LaunchRestart = Literal["in-process", "in-process:grow", "process", "none"]
LAUNCH_RESTARTS: tuple[LaunchRestart, ...] = ("in-process", "in-process:grow", "process", "none")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
CheckExitCodeOption = Annotated[
    bool,
    typer.Option(
        "--exit-code/--no-exit-code",
        show_default=False,
        help="Exit with 3 when a check fails (the default), or with 0 whatever it is.",
    ),
]
ParamOption = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="Set a parameter of the profile, and all that follows from it.",
    ),
]


def profile_names(incomplete: str) -> list[str]:
    """For completion: the names that begin so. A shell completes files where there is none."""
    from ncclops.profiles.files import profile_files  # takes as long as most commands run

    return [path.stem for _, path in profile_files() if path.stem.startswith(incomplete)]


def profile_option(text: str, panel: str | None = None) -> Any:
    """``--profile``, with what it is for in the command."""
    return typer.Option(
        "--profile",
        "-p",
        metavar="NAME|FILE",
        rich_help_panel=panel,
        help=text,
        autocompletion=profile_names,
    )


RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Run directory, run id or its beginning; default: the newest in runs/.",
    ),
]
LiveRunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Run directory, run id or its beginning; default: the run under way in runs/.",
    ),
]
# Nothing that a command writes replaces a file without this.
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
# Commands that judge exit with 1 for a bad answer unless an option says otherwise; those that show
# do so with an option. The contracts have the list.
ExitCodeOption = Annotated[
    bool,
    typer.Option(
        "--exit-code/--no-exit-code",
        show_default=False,
        help="Exit with 1 when the answer is bad (the default), or with 0 whatever it is.",
    ),
]
ChangedExitCodeOption = Annotated[
    bool,
    typer.Option(
        "--exit-code/--no-exit-code",
        show_default=False,
        help="Exit with 1 when anything differs; the default is 0.",
    ),
]


def shown(choices: Sequence[str]) -> str:
    """A fixed set of values, as the help shows it."""
    return "|".join(choices)


def one_of(option: str, choices: Sequence[str]) -> Callable[[str], str]:
    """A parser for ``option``, which takes one of ``choices``; else an error that suggests one."""

    def parse(text: str) -> str:
        if text in choices:
            return text
        hint = nearest(text, choices, or_else="")
        raise UsageError(
            f"{option} {text}: choose {', '.join(choices[:-1])} or {choices[-1]}{hint}"
        )

    return parse


def run_or_path(text: str | None) -> Path:
    """A path that exists, else the run that ``text`` names; without it the newest run in ``runs/``.

    Raises ``UsageError`` where there is no such run, unless ``text`` looks like a path: what reads
    it then says what is wrong with it.
    """
    from ncclops.record.runs import find

    if text is None:
        return find(None).path
    path = Path(text)
    if path.exists() or "/" in text or path.suffix:
        return path
    return find(text).path
