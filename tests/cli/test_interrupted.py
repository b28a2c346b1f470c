"""Ctrl-C at any moment of any command ends it with exit code 130, and without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, clean_environ

pytestmark = pytest.mark.slow

# Sends the signal when the module that the variable names is imported; at the end for `atexit`.
SITE = """
import atexit, os, signal, sys

place = os.environ["INTERRUPT_AT"]

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == place:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Watch())
if place == "atexit":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""


def environ(site: Path, place: str) -> dict[str, str]:
    own = clean_environ()
    return own | {
        "PYTHONPATH": os.pathsep.join((str(site), own["PYTHONPATH"])),
        "INTERRUPT_AT": place,
    }


def run(tmp_path: Path, place: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    return subprocess.run(
        [sys.executable, "-m", "ncclops", *arguments],
        cwd=tmp_path,
        env=environ(tmp_path, place),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    "place",
    ["ncclops.cli", "typer", "ncclops.errors", "ncclops.cli._output", "ncclops.cli.env_lint"],
)
def test_interrupted_while_it_is_imported(place: str, tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text("export NCCL_DEBUG=INFO\n")
    done = run(tmp_path, place, "env", "lint", "launch.sh")
    assert (done.returncode, done.stderr) == (130, "")


def test_interrupted_when_it_has_answered(tmp_path: Path) -> None:
    done = run(tmp_path, "atexit", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ncclops ")


def test_an_interrupt_that_is_ignored_stays_so(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    command = 'trap "" INT; exec "$0" -m ncclops --version'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable],
        cwd=tmp_path,
        env=environ(tmp_path, "typer"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
