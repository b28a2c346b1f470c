"""The command line: parse, call one function, render. No logic lives here.

One module per command, each imported at start and therefore light: whatever is heavy
(pydantic, rich, NVML) is imported inside the command's function, and torch never.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from ncclops._version import __version__
from ncclops.cli import env as env_commands
from ncclops.cli import flight as flight_commands
from ncclops.cli import profile as profile_commands
from ncclops.cli import receipt as receipt_commands
from ncclops.cli import store as store_commands
from ncclops.cli.bundle import bundle
from ncclops.cli.classify import classify
from ncclops.cli.incident import incident
from ncclops.cli.launch import launch
from ncclops.cli.report import report
from ncclops.cli.status import status
from ncclops.cli.stop import stop
from ncclops.cli.where import where
from ncclops.errors import NcclopsError

_EPILOG = """
Start with: ncclops launch --dry-run train.py (what would run, under which environment, and why),
then: ncclops launch train.py. A torchrun command line works with the first word changed.
"""

app = typer.Typer(
    name="ncclops",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog=_EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # torchrun's options are written with dashes and with underscores.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)
# What follows the script belongs to the script, whatever it looks like.
app.command(context_settings={"allow_interspersed_args": False, "allow_extra_args": True})(launch)
app.command()(status)
app.command()(stop)
app.command()(classify)
app.command()(incident)
app.command()(where)
app.command()(bundle)
app.command()(report)
app.add_typer(env_commands.app, name="env")
app.add_typer(flight_commands.app, name="flight")
app.add_typer(profile_commands.app, name="profile")
app.add_typer(receipt_commands.app, name="receipt")
app.add_typer(store_commands.app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ncclops {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Start distributed PyTorch jobs in an environment you can explain, and know how they ended."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    """Run the command line and exit with the code that the contracts promise."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an arrow is no reason to fail
    try:
        code = app(prog_name="ncclops", standalone_mode=False)
        sys.stdout.flush()
    except NcclopsError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _leave_broken_pipe()
    except Exception as error:
        # The parser's usage errors. Their class moved between the releases of typer that we
        # accept (it carries its own click since 0.20); that they can word themselves did not.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        _fail(format_message(), getattr(error, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def _open_missing_streams() -> None:
    # A caller may have closed them (`>&-`); nothing here expects that.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"ncclops: error: {' '.join(message.split())}\n")
    sys.exit(code)


def _leave_broken_pipe() -> NoReturn:
    # The reader (`| head`) has gone: nobody is left to tell, and Python must not try again
    # when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
