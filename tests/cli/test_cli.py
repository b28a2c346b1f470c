"""The command line as a whole: quick, light, and polite when used wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText, clean_environ

Ncclops = Callable[..., CompletedText]

# Modules whose import would be felt on every command.
HEAVY = ("torch", "pydantic", "rich", "numpy", "pynvml", "asyncio")


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import ncclops", ()),
        ("import ncclops.cli", ()),
        ("import ncclops.env", ("pydantic",)),
        ("import ncclops.profiles", ("pydantic",)),
        ("import ncclops.classify", ()),
        ("import ncclops.receipts, ncclops.receipt", ()),
        ("import sys; sys.argv = ['ncclops', '--version']; import ncclops.cli as c; c.app()", ()),
        (
            "import sys; sys.argv = ['ncclops', 'launch', '--dry-run', '/dev/null'];"
            "import ncclops.cli as c; c.app()",
            ("pydantic", "rich", "pynvml"),
        ),
    ],
)
def test_nothing_heavy_is_imported(statement: str, allowed: tuple[str, ...]) -> None:
    """torch never; the rest only where a command needs it."""
    program = (
        f"import atexit, json, sys\n"
        f"report = lambda: print('LOADED', json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
        f"atexit.register(report)\n"
        f"{statement}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environ(), capture_output=True, text=True
    )
    loaded = set(json.loads(done.stderr.rpartition("LOADED")[2]))
    assert loaded & set(HEAVY) <= set(allowed)


def test_version_and_module_entry(ncclops: Ncclops) -> None:
    from ncclops import __version__

    assert ncclops("--version").stdout == f"ncclops {__version__}\n"


def test_help_names_every_command(ncclops: Ncclops) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        done = ncclops(*arguments)
        assert done.returncode == 0
        for command in ("launch", "classify", "receipt", "env", "profile"):
            assert command in done.stdout


@pytest.mark.parametrize("arguments", [["lunch"], ["--bogus"], ["env", "dif"], ["launch"]])
def test_wrong_usage_is_one_line_and_exit_2(arguments: list[str], ncclops: Ncclops) -> None:
    done = ncclops(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ncclops: error: ")


def test_completion_installs_and_completes(ncclops: Ncclops, tmp_path: Path) -> None:
    # There is no shell to detect above a test, so it is named.
    home = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = ncclops("--install-completion", "bash", env=home)
    assert done.returncode == 0, done.stderr
    assert "ncclops" in (tmp_path / ".bashrc").read_text()
    asked = {"_NCCLOPS_COMPLETE": "complete_bash", "COMP_WORDS": "ncclops la", "COMP_CWORD": "1"}
    assert ncclops(env=asked).stdout.split() == ["launch"]


def test_a_reader_that_leaves_is_no_error_worth_a_traceback(ncclops: Ncclops) -> None:
    done = subprocess.run(
        f"{sys.executable} -m ncclops profile list | true",
        shell=True,
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
