"""What an agent takes from the notes of monitor processes: of its own workers, as they ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ncclops.agent.ended_by_monitor import why_ended
from ncclops.agent.workers import Exit, Worker
from ncclops.record.documents import write_document
from ncclops.record.snapshot_files import PROCESS, add_missing, rank_dir

WHY = "hard timeout: the main thread did not move for 18.3 s (hard timeout 18 s)"
TERMINATED = Exit(None, "SIGTERM")


@pytest.fixture
def worker() -> Iterator[Worker]:
    ours, theirs = socket.socketpair()
    process: Any = SimpleNamespace(pid=os.getpid())
    made = Worker(3, process, ours)
    made.exit = TERMINATED
    yield made
    os.close(made.pidfd)
    ours.close()
    theirs.close()


def note(incidents: Path, number: int, pid: int, ended_for: str | None) -> None:
    directory = rank_dir(incidents / str(number), 3)
    directory.mkdir(parents=True)
    write_document(directory / PROCESS, {"rank": 3, "pid": pid})
    add_missing(directory, "the process died", [], ended=True, ended_for=ended_for)


def test_a_rank_that_its_monitor_has_ended(tmp_path: Path, worker: Worker) -> None:
    note(tmp_path, 0, worker.pid, None)
    note(tmp_path, 1, worker.pid, WHY)
    assert why_ended(tmp_path, [worker]) == {3: WHY}


@pytest.mark.parametrize(
    ("later", "ended_for", "how"),
    [
        (1, WHY, TERMINATED),  # of the process before it
        (0, None, TERMINATED),  # by somebody else
        (0, WHY, Exit(1, None)),  # by itself, before the signal
    ],
)
def test_other_ends_are_not_explained(
    tmp_path: Path, worker: Worker, later: int, ended_for: str | None, how: Exit
) -> None:
    note(tmp_path, 0, worker.pid - later, ended_for)
    worker.exit = how
    assert why_ended(tmp_path, [worker]) == {}


def test_without_incidents_nothing_is_known(tmp_path: Path, worker: Worker) -> None:
    assert why_ended(tmp_path / "none", [worker]) == {}
