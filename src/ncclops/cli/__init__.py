"""The command line: parse, call one function, render. No logic lives here.

One module per command, imported when that command is called; whatever is heavy (pydantic, rich,
NVML) is imported inside the command's function, and torch never. The commands are in ``_commands``,
exit codes in ``_exit_codes``.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from ncclops._version import __version__
from ncclops.cli import _output, _verbosity
from ncclops.cli._commands import CommandTable
from ncclops.errors import (
    EXIT_INTERNAL_ERROR,
    EXIT_INTERRUPTED,
    STORE_CALL,
    NcclopsError,
    UsageError,
)
from ncclops.exhausted import advice, described
from ncclops.plain_text import plain, plain_line
from ncclops.whole_numbers import whole_number

# What a write to a full or broken disk raises, without the name of a file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
# Of a path that can be none: one word of more than 255 bytes, or links in a circle.
_NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)
_MOST_CHARS_OF_NAME = 80
# An error is one line; what it quotes may be of any length.
_MOST_CHARS = 2000
_EPILOG = """
Start with: ncclops launch --dry-run train.py (what would run, under which environment, and why),
then: ncclops launch train.py. A torchrun command line works with the first word changed. After a
failure: ncclops diagnose.
"""

app = typer.Typer(
    name="ncclops",
    cls=CommandTable,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=_EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # torchrun's options are written with dashes and with underscores.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)


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
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            callback=_verbosity.louder,
            show_default=False,
            help="Say more on stderr; twice for debugging. Also after the command's name.",
        ),
    ] = 0,
    quiet: Annotated[
        bool,
        typer.Option(
            "-q",
            "--quiet",
            callback=_verbosity.quieter,
            help="Say nothing on stderr but warnings and errors.",
        ),
    ] = False,
) -> None:
    """Start distributed PyTorch jobs in an environment you can explain, and know how they ended."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    """Run the command line and exit with the code that the contracts promise."""
    _open_missing_streams()
    _forget_sizes_that_are_none()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an arrow is no reason to fail
    code = run()
    try:
        sys.stderr.flush()
    except OSError:  # Python would try again, and exit with a code of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    if any(each.name == STORE_CALL for each in threading.enumerate()):
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code.

    For the main thread: `launch` handles signals.
    """
    _verbosity.reset()
    try:
        code = app(arguments, prog_name="ncclops", standalone_mode=False)
        sys.stdout.flush()
    except NcclopsError as error:
        _tell_the_starter(error)
        return _fail(*error.lines, code=error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _leave_broken_pipe()
    except OSError as error:
        return _fail_for_the_system(error)
    except Exception as error:  # noqa: BLE001 - the boundary of the process; recorded
        # The parser's usage errors. Their class moved between the releases of typer that we
        # accept (it carries its own click since 0.20); that they can word themselves did not.
        if hasattr(error, "format_message"):
            from ncclops.cli._refused import worded

            line = worded(error)
            _tell_the_starter(UsageError(line))
            return _fail(line, code=getattr(error, "exit_code", 2))
        return _fail_for_what_is_exhausted(error)
    return code if isinstance(code, int) else 0


def _forget_sizes_that_are_none() -> None:
    """rich takes every digit for a number (``COLUMNS=²``), and fails where it is none."""
    for name in ("COLUMNS", "LINES"):
        if name in os.environ and whole_number(os.environ[name]) is None:
            del os.environ[name]


def _open_missing_streams() -> None:
    # A caller may have closed them (`<&-`). The next file that is opened, such as the listener of
    # the ranks' store, would have the number of a standard stream, and a child get another there.
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115


def _tell_the_starter(error: NcclopsError) -> None:
    """``error``, of options that were not even parsed, to a program that starts a run with them."""
    if "NCCLOPS_START_REPORT_FD" not in os.environ:  # ``start_report.VARIABLE``
        return
    from ncclops.launch import start_report

    with suppress(NcclopsError), start_report.reporting(os.environ):
        raise error


def _fail(*lines: str, code: int) -> int:
    for line in lines or ("",):
        _output.tell(f"ncclops: error: {plain_line(line, _MOST_CHARS)}\n")
    return code


def _fail_for_the_system(error: OSError) -> int:
    """What the system has refused; ``error`` was not expected where it came up."""
    if error.filename is None and error.errno in _FULL:
        return _fail(f"cannot write standard output: {error.strerror}", code=1)
    if isinstance(error, PermissionError) and error.filename is not None:
        return _fail(f"{described(error)}: check its mode and its owner", code=UsageError.exit_code)
    if error.filename is not None and error.errno in _NO_NAME:
        name = plain_line(os.fsdecode(error.filename), _MOST_CHARS_OF_NAME)
        return _fail(f"{error.strerror}: {name}: name another path", code=UsageError.exit_code)
    if error.filename is None and isinstance(error, FileNotFoundError) and _is_nowhere():
        what = "the current directory has been removed: change to one that exists"
        return _fail(what, code=UsageError.exit_code)
    return _fail_for_what_is_exhausted(error)


def _fail_for_what_is_exhausted(error: Exception) -> int:
    """Where nothing is: for a fault of our own."""
    return _fail_ourselves(error) if advice(error) is None else _fail(described(error), code=1)


def _is_nowhere() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is not needed else
    except OSError:
        return True
    return False


def _fail_ourselves(error: Exception) -> int:
    """One line about a fault of ncclops, and where its traceback is; with ``-v`` here."""
    import tempfile
    import traceback

    trace = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="ncclops-error-", suffix=".log", delete=False
        ) as log:
            log.write(f"ncclops {__version__}: {sys.argv}\n{trace}")
        where = f"traceback in {log.name}"
    except OSError as problem:
        where = f"the traceback cannot be written ({problem.strerror}): -v shows it"
    if _verbosity.level() > 0:
        _output.tell(plain(trace))
    what = f"{type(error).__name__}: {error}"
    return _fail(f"internal error: {what}; {where}; please report it", code=EXIT_INTERNAL_ERROR)


def _leave_broken_pipe() -> int:
    # The reader (`| head`) has gone, and Python must not try again when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
