"""Whatever is in a run directory, a command ends with its answer, or one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import recorded
from tests.hostile.commands import Commands

pytestmark = pytest.mark.slow

SEEDS = range(30)  # scripts/fuzz.py has more
AT_ONCE = 5  # so many in a test: each takes eleven commands


def test_every_command_answers_on_the_run_itself(run: Path, commands: Commands) -> None:
    assert commands.complaints(run.parent) == []


@pytest.mark.parametrize(
    "first",
    [
        SEEDS[0],
        *(pytest.param(seed, marks=pytest.mark.extended) for seed in SEEDS[AT_ONCE::AT_ONCE]),
    ],
)
def test_every_command_answers_on_damaged_runs(
    first: int, run: Path, commands: Commands, tmp_path: Path
) -> None:
    problems = []
    for seed in SEEDS[first : first + AT_ONCE]:
        what = recorded.damaged(run, tmp_path, seed)
        problems += [f"{what}\n{each}" for each in commands.complaints(tmp_path)]
    assert problems == []
