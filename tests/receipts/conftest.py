"""Workers for tests: small scripts that report, in separate processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LIMIT_S, CompletedText, clean_environ

Record = dict[str, Any]


class Rank:
    """A rank's part of the run directory."""

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self.run_dir = run_dir
        self.path = run_dir / "ranks" / str(rank) / "receipt.jsonl"

    @property
    def records(self) -> list[Record]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def named(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.named("step")]


def worker_environ(run_dir: Path, rank: int = 0) -> dict[str, str]:
    return clean_environ({"NCCLOPS_RUN_DIR": str(run_dir), "RANK": str(rank)})


@pytest.fixture
def rank0(starts_processes: None, tmp_path: Path) -> Rank:
    return Rank(tmp_path / "run")


@pytest.fixture
def report(starts_processes: None, tmp_path: Path) -> Callable[[str], CompletedText]:
    """``report(source)`` runs a script as rank 0 of a run in ``tmp_path / "run"``."""

    def run(source: str) -> CompletedText:
        return subprocess.run(
            [sys.executable, "-c", source],
            cwd=tmp_path,
            env=worker_environ(tmp_path / "run"),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    return run
