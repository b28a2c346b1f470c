"""The command line: parse, call one function, render. No logic lives here.

One module per command, each imported at start and therefore light: whatever is heavy
(pydantic, rich tables, NVML, never torch) is imported inside the command's function.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from ncclops._version import __version__
from ncclops.cli.classify import classify
from ncclops.errors import NcclopsError

app = typer.Typer(
    name="ncclops",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ncclops {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Start distributed PyTorch jobs with an environment you can explain."""


app.command()(classify)


def main() -> NoReturn:
    """Run the command line and exit with the code that CONTRACTS promises."""
    try:
        code = app(standalone_mode=False)
    except NcclopsError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _leave_broken_pipe()
    except Exception as error:
        # typer carries its own copy of click from 0.20 on; older ones use the package. The
        # usage errors of both know how to print themselves, and nothing else does.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        _fail(format_message(), getattr(error, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"ncclops: error: {' '.join(message.split())}\n")
    sys.exit(code)


def _leave_broken_pipe() -> NoReturn:
    # The reader (`| head`) has gone: nobody is left to tell, and Python must not try again
    # when it flushes at exit.
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
