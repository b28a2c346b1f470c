"""Which places of modules ranks of another interpreter look through."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from ncclops.testing import Interpreter

PROGRAMS = ["/job/src", "/job/tests"]
OWN = [
    "/usr/lib/python311.zip",
    sysconfig.get_path("stdlib"),
    f"{sysconfig.get_path('stdlib')}/lib-dynload",
    "/job/.venv/lib/python3.11/site-packages",
    "/usr/lib/python3/dist-packages",
]


def test_another_interpreter_has_its_own_packages() -> None:
    other = Interpreter(Path("/other/bin/python"))
    assert other.path([PROGRAMS[0], *OWN, PROGRAMS[1]]) == PROGRAMS


def test_this_interpreter_has_those_of_this_process() -> None:
    assert Interpreter().path([*PROGRAMS, *OWN]) == [*PROGRAMS, *OWN]
    assert Interpreter(Path(sys.executable)).is_this_one
