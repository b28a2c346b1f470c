"""Whatever file is handed over, a command answers, or says in one line why not; and soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import handed_over
from tests.hostile.commands import Commands

pytestmark = pytest.mark.slow

SEEDS = 1


def test_every_command_answers_on_what_is_handed_over(tmp_path: Path) -> None:
    problems = []
    with Commands("handed-over") as commands:
        for name, files in (("samples", {}), ("shapes", handed_over.SHAPES)):
            handed_over.write(tmp_path / "files", files)
            problems += [f"{name}\n{each}" for each in commands.complaints(tmp_path / "files")]
        for seed in range(SEEDS):
            what = handed_over.damaged(tmp_path / "files", seed)
            problems += [f"{what}\n{each}" for each in commands.complaints(tmp_path / "files")]
    assert problems == []
