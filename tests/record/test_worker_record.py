"""What a worker reports to the agent: a line of its rank's file, and nothing outside a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.record import event_log, worker_record
from ncclops.record.events import FaultEvent
from ncclops.record.paths import RunPaths
from ncclops.record.variables import RUN_DIR


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
