"""Halves of characters, as Python has them of names that are no UTF-8, in what scripts raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText

pytestmark = pytest.mark.slow

NAME = "data-\\udcff\\udce9.bin"
SCRIPT = f"""
from ncclops import receipt

with receipt.phase("reading {NAME}"):
    receipt.step(0)
{{end}}
"""


@pytest.mark.parametrize(
    "restart", ["in-process", pytest.param("process", marks=pytest.mark.extended)]
)
@pytest.mark.parametrize(
    "end",
    [
        f'raise RuntimeError("cannot read {NAME}")',
        pytest.param(f'import sys; sys.exit("bad {NAME}")', marks=pytest.mark.extended),
    ],
)
def test_a_name_that_is_no_utf_8_ends_the_run_as_any_other_error(
    end: str, restart: str, ncclops: Callable[..., CompletedText], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(SCRIPT.format(end=end))
    options = ("--nproc-per-node", "1", "--restart", restart)
    done = ncclops("launch", *options, "--run-dir", "run", "bad.py")
    assert done.returncode == 1, done.stderr
    verdict = json.loads((tmp_path / "run/verdict.json").read_text())
    assert (verdict["outcome"], verdict["classification"]["class"]) == ("failed", "user-error")
    assert len(list((tmp_path / "run").glob("incidents/*"))) <= 3
    ours = [line for line in done.stderr.splitlines() if line.startswith("ncclops: ")]
    assert not any("internal error" in line for line in ours)
    assert "ncclops-receipts" not in done.stderr and "Logging error" not in done.stderr
    if restart == "in-process" and "raise" in end:
        logged = (tmp_path / "run/ranks/0/worker.log").read_text()
        assert "RuntimeError: cannot read data-\\udcff\\udce9.bin" in logged
    kinds = [
        json.loads(line)["kind"]
        for line in (tmp_path / "run/ranks/0/receipt.jsonl").read_text().splitlines()
    ]
    assert {"phase-begin", "step"} <= set(kinds)
    for command in ("diagnose", "report", "incident", "status", "classify"):
        read = ncclops(command, "run")
        assert read.returncode in (0, 2) and "internal error" not in read.stderr, read.stderr
