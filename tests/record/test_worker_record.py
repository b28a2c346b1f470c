"""What a worker reports to the agent: a line of its rank's file, and nothing outside a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclops.record import event_log, worker_record
from ncclops.record.events import ExitingEvent, FaultEvent
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN, RunRecord
from ncclops.record.variables import RUN_DIR, RUN_ID


def test_events_are_appended_to_the_ranks_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    file = RunPaths(tmp_path).rank(0).worker_events
    file.parent.mkdir(parents=True)
    for cause in ("first", "second"):
        worker_record.report(FaultEvent(cause=cause))
    read = event_log.read(file)
    assert [each.cause for each in read if isinstance(each, FaultEvent)] == ["first", "second"]


def test_outside_a_run_and_without_its_directory_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN_DIR, raising=False)
    worker_record.report(FaultEvent(cause="x"))
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "gone"))
    worker_record.report(FaultEvent(cause="x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("starts_processes")
def test_a_process_that_the_worker_has_forked_reports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be taken for the end of the worker, which would be ended for not coming to it."""
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    file = RunPaths(tmp_path).rank(int(worker_record.own_rank())).worker_events
    file.parent.mkdir(parents=True)
    if (child := os.fork()) == 0:
        worker_record.report(ExitingEvent())
        os._exit(0)
    os.waitpid(child, 0)
    assert not file.exists()


@pytest.mark.parametrize(("run_id", "written"), [("own", 1), ("another", 0)])
def test_a_worker_reports_nothing_to_another_run_that_has_its_directory_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str, written: int
) -> None:
    """The rank of the same number would be taken for finished, whatever becomes of it."""
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setenv(RUN_ID, "own")
    paths = RunPaths(tmp_path)
    RUN.write(paths.run, RunRecord(run_id=run_id))
    file = paths.rank(int(worker_record.own_rank())).worker_events
    file.parent.mkdir(parents=True)
    worker_record.report(ExitingEvent())
    assert len(event_log.read(file)) == written


def test_the_runs_record_is_read_once_until_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has kilobytes, and a restart in place reports several events."""
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setenv(RUN_ID, "own")
    paths = RunPaths(tmp_path)
    RUN.write(paths.run, RunRecord(run_id="own"))
    file = paths.rank(int(worker_record.own_rank())).worker_events
    file.parent.mkdir(parents=True)
    worker_record.report(FaultEvent(cause="x"))

    before, text = paths.run.stat(), paths.run.read_text()
    paths.run.write_text(text.replace('"own"', '"new"'))  # in place, and as if it were as before
    os.utime(paths.run, ns=(before.st_atime_ns, before.st_mtime_ns))
    worker_record.report(FaultEvent(cause="x"))
    assert len(event_log.read(file)) == 2

    RUN.write(paths.run, RunRecord(run_id="new"))
    worker_record.report(FaultEvent(cause="x"))
    assert len(event_log.read(file)) == 2
