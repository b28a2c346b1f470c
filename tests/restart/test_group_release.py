"""A group can be released whatever its worker threads are about to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Job

pytestmark = pytest.mark.slow


def test_a_group_ends_while_its_worker_wants_the_gil() -> None:
    """torch before 2.8 joins the worker with the GIL in its hands, and neither ever gets on."""
    script = str(Path(__file__).with_name("group_in_use.py"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=80
    )
    assert done.stdout == "went on\n", done.stderr


def test_python_ends_with_a_group_whose_worker_wants_the_gil() -> None:
    """Without us the process hangs, or is ended by SIGABRT."""
    script = str(Path(__file__).with_name("group_left_at_exit.py"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=80
    )
    assert (done.returncode, done.stdout) == (0, "last line\n"), done.stderr


def test_the_reducer_of_a_model_ends_a_group_whose_worker_wants_the_gil(job: Job) -> None:
    """It keeps the GIL while it does that, also in torch 2.13."""
    assert job.start(2, "group_programs:ending_with_a_reducer").wait() == {0: 0, 1: 0}
    assert job.events("incident") == []


def test_no_restart_waits_for_the_end_of_a_group(job: Job) -> None:
    assert job.start(2, "group_programs:ending_late").wait() == {0: 0, 1: 0}
    assert {event["cause"] for event in job.events("incident")} == {"exception"}


def test_a_script_that_makes_its_group_anew_lets_its_peers_out_of_the_last_one(job: Job) -> None:
    assert job.start(2, "group_programs:made_anew_by_the_script").wait() == {0: 0, 1: 0}
    assert [event["rank"] for event in job.events("left")] == [1]
    assert job.events("incident") == []
