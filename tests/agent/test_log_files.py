"""The workers' files: there before the workers are, and shown as was asked for."""

from __future__ import annotations

from pathlib import Path

from ncclops.agent import log_files
from ncclops.agent.layout import Shown
from ncclops.record.run_directory import RunDirectory


def test_they_can_be_followed_from_the_start(tmp_path: Path) -> None:
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n1")
    log_files.make(run, [4, 5])
    files = log_files.output(run, [4, 5])
    assert list(files.values()) == [4, 4, 5, 5]
    assert all(path.exists() for path in files)
    assert run.paths.rank(5).receipt.exists()
    assert run.paths.rank(5).worker_events.exists()


def test_ranks_are_chosen_by_their_number_on_this_node(tmp_path: Path) -> None:
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n1")
    choice = Shown(stdout=frozenset({0}), stderr=frozenset({0, 1}))
    shown = log_files.shown(run, [4, 5], choice)
    assert [(each.rank, each.path, each.to_stderr) for each in shown] == [
        (4, run.paths.rank(4).stdout_log, False),
        (4, run.paths.rank(4).stderr_log, True),
        (5, run.paths.rank(5).stderr_log, True),
    ]
