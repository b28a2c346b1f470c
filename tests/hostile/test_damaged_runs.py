"""Whatever is in a run directory, a command ends with its answer, or one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import recorded
from tests.hostile.commands import Commands

pytestmark = pytest.mark.slow

SEEDS = 60


def test_every_command_answers_on_damaged_runs(tmp_path: Path) -> None:
    run = recorded.record(tmp_path)
    (tmp_path / "copy").mkdir()
    problems = []
    with Commands() as commands:
        assert commands.complaints(tmp_path) == []
        for seed in range(SEEDS):
            what = recorded.damaged(run, tmp_path / "copy", seed)
            problems += [f"{what}\n{each}" for each in commands.complaints(tmp_path / "copy")]
    assert problems == []
