"""Runs of `ncclops launch` for tests: scripts to start, and what is left of a run to look at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import LIMIT_S, clean_environ
from tests.lanes import Lane, LaneProcess

QUICK_PROFILE = """
description = "For tests: a short time between SIGTERM and SIGKILL."
kind = "lane"
nodes = "any"
extends = "{lane}"
[timeouts]
stop_grace = "2s"
"""


class Run:
    """A run directory, read back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def begun(self) -> bool:
        return (self.path / "events.jsonl").exists()

    @property
    def reason(self) -> str:
        """The verdict's, without "from outside": said where the kernel counts OOM kills."""
        return str(self.verdict["reason"]).replace(" (from outside)", "")

    @property
    def verdict(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.path / "verdict.json").read_text())
        return document

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = (self.path / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def named(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.events if record["event"] == event]

    def stdout(self, rank: int) -> str:
        return (self.path / "ranks" / str(rank) / "stdout.log").read_text()

    def stderr(self, rank: int) -> str:
        return (self.path / "ranks" / str(rank) / "stderr.log").read_text()

    def worker_log(self, rank: int) -> str:
        return (self.path / "ranks" / str(rank) / "worker.log").read_text()


@pytest.fixture
def quick_profile(tmp_path: Path, lane: Lane) -> Path:
    path = tmp_path / "quick.toml"
    path.write_text(QUICK_PROFILE.format(lane=lane.profile))
    return path


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """``script(source)`` writes a script to start."""

    def write(source: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(source)
        return path

    return write


@pytest.fixture
def only_run(tmp_path: Path) -> Callable[[], Run]:
    """The one run that was made below ``runs``."""

    def find() -> Run:
        (path,) = (tmp_path / "runs").iterdir()
        return Run(path)

    return find


Background = subprocess.Popen[Any]  # text or bytes, as the test has it with its streams


@pytest.fixture
def background(
    starts_processes: None, tmp_path: Path, lane_process: LaneProcess
) -> Iterator[Callable[..., Background]]:
    """``background("launch", ...)`` starts the command line on the lane and leaves it running.

    Whatever the test does to it, nothing of it is left afterwards.
    """
    started: list[Background] = []
    mark = f"test-{os.getpid()}-{tmp_path.name}"

    def start(*arguments: str | Path, **streams: Any) -> Background:
        process = subprocess.Popen(
            [lane_process.python, "-m", "ncclops", *map(str, arguments)],
            cwd=tmp_path,
            env=clean_environ(lane_process.environment | {"TEST_MARK": mark}),
            **({"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | streams),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(LIMIT_S)
    for left in marked(mark):
        with suppress(psutil.NoSuchProcess):  # its parent ends it, too
            left.kill()


def marked(mark: str) -> list[psutil.Process]:
    """Processes alive that carry ``mark`` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get("TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def of_this_test(tmp_path: Path) -> Callable[[], list[psutil.Process]]:
    """The processes alive that ``background`` started, directly or not."""
    return lambda: marked(f"test-{os.getpid()}-{tmp_path.name}")


def name_of(signum: signal.Signals) -> str:
    return signum.name
