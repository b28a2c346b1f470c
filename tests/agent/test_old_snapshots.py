"""A run directory does not grow without end, however often its job restarts."""

from __future__ import annotations

from pathlib import Path

from ncclops.agent.old_snapshots import FIRST, LAST, remove_old
from ncclops.record.documents import read_document, write_document
from ncclops.record.paths import RunPaths


def add_incident(run: RunPaths, number: int) -> None:
    for rank in (0, 1):
        directory = run.incident(number) / f"rank{rank}"
        directory.mkdir(parents=True)
        (directory / "flight.json").write_text("{}")
    write_document(run.incident(number) / "incident.json", {"iteration": number})
    write_document(run.incident(number) / "rank1" / "missing.json", {"reason": "late"})


def test_snapshots_of_incidents_in_the_middle_are_removed_and_say_so(tmp_path: Path) -> None:
    run, outside = RunPaths(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    (outside / "model.pt").write_text("weights")
    for number in range(FIRST + LAST):
        add_incident(run, number)
    assert remove_old(run) == []
    add_incident(run, FIRST + LAST)
    add_incident(run, FIRST + LAST + 1)
    (run.incident(FIRST) / "rank7").symlink_to(outside)  # followed nowhere
    (run.incident(FIRST) / "rank0" / "link").symlink_to(outside)
    assert remove_old(run) == [FIRST, FIRST + 1]
    assert remove_old(run) == []
    assert (outside / "model.pt").exists()
    for number in range(FIRST + LAST + 2):
        is_old = number in (FIRST, FIRST + 1)
        assert read_document(run.incident(number) / "incident.json") == {"iteration": number}
        assert (run.incident(number) / "rank0" / "flight.json").exists() is not is_old
    missing = read_document(run.incident(FIRST) / "rank1" / "missing.json")
    assert missing["reason"].startswith("late; removed: a run keeps the snapshots of its first 10")
    assert missing["files"] == ["flight.json"]
