"""What a type checker says to programs that use the API rightly and wrongly."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "typing_programs"
REPOSITORY = Path(__file__).parents[2]
# With a cold cache mypy reads the whole package first.
LIMIT_S = 150


def complaints(program: str) -> set[tuple[int, str]]:
    """Line and code of each of mypy's errors in ``program``."""
    command = [sys.executable, "-m", "mypy", "--no-warn-unreachable", str(PROGRAMS / program)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S)
    assert not done.stderr, done.stderr
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = [re.search(rf"{program}:(\d+): error: .*\[([\w-]+)\]$", line) for line in errors]
    assert all(found), done.stdout
    return {(int(each[1]), each[2]) for each in found if each}


@pytest.mark.slow
def test_right_uses_are_accepted() -> None:
    assert complaints("right.py") == set()


@pytest.mark.slow
def test_each_wrong_use_is_refused_for_its_own_reason() -> None:
    lines = (PROGRAMS / "wrong.py").read_text().splitlines()
    expected = {
        (number, code)
        for number, line in enumerate(lines, 1)
        if (mark := re.search(r"# E: (.+)$", line))
        for code in mark[1].split(", ")
    }
    assert complaints("wrong.py") == expected
