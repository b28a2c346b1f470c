"""Where values come from: NCCL's configuration files and the exporting process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ncclops.env.audit import find_libnccl
from ncclops.env.origins import exported_by, from_files, parse_conf

TEXT = """\
NCCL_A=one
NCCL_A=two
 NCCL_B=leading space
NCCL_C = spaced\x20
export NCCL_D=x
#NCCL_E=comment
NCCL_F=a # no comment
NCCL_G
NCCL_H=
NCCL_I="quoted"
"""
# What libnccl itself makes of it (2.32.3): the C environment after its first call.
EXPECTED = {
    "NCCL_A": "one",
    " NCCL_B": "leading space",
    "NCCL_C ": " spaced ",
    "export NCCL_D": "x",
    "NCCL_F": "a # no comment",
    "NCCL_H": "",
    "NCCL_I": '"quoted"',
}


def added(environ: dict[str, str], etc: Path) -> dict[str, str]:
    return {name: found.value for name, found in from_files(environ, etc).items()}


def test_a_file_is_read_as_nccl_reads_it(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text(TEXT, encoding="utf-8")
    assert added({"HOME": "/nonexistent"}, tmp_path) == EXPECTED


def test_nccl_itself_reads_a_file_like_that(tmp_path: Path) -> None:
    library = find_libnccl() or os.environ.get("NCCLOPS_TEST_LIBNCCL")
    if library is None:
        pytest.skip("no libnccl here (pip install nvidia-nccl-cu13, or NCCLOPS_TEST_LIBNCCL)")
    (tmp_path / "mine.conf").write_text(TEXT, encoding="utf-8")
    code = (
        "import ctypes, json, sys; nccl = ctypes.CDLL(sys.argv[1]); libc = ctypes.CDLL(None);"
        "libc.getenv.restype = ctypes.c_char_p;"
        "nccl.ncclGetUniqueId(ctypes.create_string_buffer(128));"
        "print(json.dumps({n: (libc.getenv(n.encode()) or b'').decode() for n in sys.argv[2:]}))"
    )
    environ = {"PATH": os.environ["PATH"], "NCCL_CONF_FILE": str(tmp_path / "mine.conf")}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(library), *EXPECTED],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert json.loads(ran.stdout) == EXPECTED, ran.stderr


def test_the_users_file_wins_and_the_environment_wins_over_both(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_A=etc\nNCCL_B=etc\nNCCL_C=etc\n", encoding="utf-8")
    (tmp_path / ".nccl.conf").write_text("NCCL_A=user\nNCCL_B=user\n", encoding="utf-8")
    environ = {"HOME": str(tmp_path), "NCCL_A": "mine"}
    found = from_files(environ, tmp_path)
    assert {name: item.value for name, item in found.items()} == {"NCCL_B": "user", "NCCL_C": "etc"}
    assert found["NCCL_B"].source == f"{tmp_path}/.nccl.conf, line 2"


def test_a_named_file_replaces_the_users(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_A=user\n", encoding="utf-8")
    (tmp_path / "other").write_text("NCCL_A=other\n", encoding="utf-8")
    environ = {"HOME": str(tmp_path), "NCCL_CONF_FILE": str(tmp_path / "other")}
    assert added(environ, tmp_path) == {"NCCL_A": "other"}


def test_long_names_and_values_are_cut_where_nccl_cuts_them() -> None:
    (setting,) = parse_conf(f"NCCL_A={'x' * 2000}", Path("f"))
    assert len(setting.value) == 1023


@pytest.mark.slow
def test_the_exporting_process_is_found() -> None:
    """A shell exports a variable for a child of a child: the shell is named."""
    code = (
        "import os; from ncclops.env.origins import exported_by;"
        "print(exported_by('MARK', os.environ['MARK']))"
    )
    ran = subprocess.run(
        ["sh", "-c", 'export MARK=7; "$0" -c "$1"; :', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.startswith(("sh (process", "dash (process", "bash (process")), ran.stderr


def test_what_came_with_the_process_is_not_blamed_on_it() -> None:
    value = os.environ["PATH"]
    assert exported_by("PATH", value + ":changed-in-here") != ""


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_holds_up_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nccl.conf").write_text("NCCL_A=one\n", encoding="utf-8")
    assert added({"NCCL_CONF_FILE": str(tmp_path / "pipe")}, tmp_path) == {"NCCL_A": "one"}
