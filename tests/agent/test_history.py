"""Attempts are counted per job: a new agent of the same job goes on counting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclops.agent.history import JobHistory
from ncclops.classify.policy import PastAttempt

FAILED = PastAttempt(class_="bootstrap", signature="s", policy="retry-once-lazy", progressed=False)


@pytest.mark.parametrize(
    ("first", "second", "remembered"),
    [
        ({"NCCLOPS_JOB_ID": "a/b"}, {"NCCLOPS_JOB_ID": "a/b"}, 1),
        ({"NCCLOPS_JOB_ID": "a"}, {"NCCLOPS_JOB_ID": "b"}, 0),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, 1),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, 0),
        ({}, {}, 0),
    ],
)
def test_which_attempts_count(
    first: dict[str, str], second: dict[str, str], remembered: int, tmp_path: Path
) -> None:
    before = JobHistory.of_job(first, tmp_path)
    before.add(FAILED)
    before.flush()
    history = JobHistory.of_job(second, tmp_path)
    assert history.attempts == [FAILED] * remembered
    assert history.earlier == remembered


def test_a_damaged_record_costs_its_line_only(tmp_path: Path) -> None:
    environ = {"NCCLOPS_JOB_ID": "j"}
    before = JobHistory.of_job(environ, tmp_path)
    before.add(FAILED)
    before.flush()
    with (tmp_path / "jobs" / "j.jsonl").open("a") as file:
        file.write('{"class": "boot\n')
    after = JobHistory.of_job(environ, tmp_path)
    after.add(FAILED)
    after.flush()
    assert len(JobHistory.of_job(environ, tmp_path).attempts) == 2


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"[" * 100_000, b"5", b"[]", b'{"class": 5, "signature": []}']
)
def test_lines_of_any_content_cost_no_launch(line: bytes, tmp_path: Path) -> None:
    environ = {"NCCLOPS_JOB_ID": "j"}
    before = JobHistory.of_job(environ, tmp_path)
    before.add(FAILED)
    before.flush()
    with (tmp_path / "jobs" / "j.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert JobHistory.of_job(environ, tmp_path).attempts[0] == FAILED


@pytest.mark.timeout(20)
def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    os.mkfifo(tmp_path / "jobs" / "j.jsonl")
    history = JobHistory.of_job({"NCCLOPS_JOB_ID": "j"}, tmp_path)
    assert history.attempts == []
    history.add(FAILED)
    history.flush()
    assert history.attempts == [FAILED]
