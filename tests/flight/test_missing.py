"""missing.json: why a rank has left no snapshot, as fields, whatever the words say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ncclops.flight import rank_files
from ncclops.flight.model import FlightEvidence, RankEvidence
from ncclops.record import snapshot_files


def read(folder: Path) -> RankEvidence:
    rank = RankEvidence(3)
    rank_files.read(FlightEvidence("run"), rank, folder)
    return rank


@pytest.mark.parametrize("reason", ["its process has ended (SIGKILL)", "reworded"])
def test_a_rank_whose_process_has_ended(tmp_path: Path, reason: str) -> None:
    snapshot_files.add_missing(tmp_path, reason, [snapshot_files.FLIGHT], ended=True)
    rank = read(tmp_path)
    assert (rank.ended, rank.ended_well, rank.silent) == (reason, False, False)


def test_a_rank_that_was_silent_and_then_ended_is_both(tmp_path: Path) -> None:
    snapshot_files.add_missing(tmp_path, "no answer", [snapshot_files.FLIGHT], silent=True)
    snapshot_files.add_missing(
        tmp_path, "over", [snapshot_files.STACKS], ended=True, ended_well=True
    )
    rank = read(tmp_path)
    assert (rank.ended, rank.ended_well, rank.silent) == ("no answer; over", True, True)


@pytest.mark.parametrize("signal", ["SIGABRT", "SIGKILL", None])
def test_the_signal_that_ended_a_rank_is_a_field(tmp_path: Path, signal: str | None) -> None:
    snapshot_files.add_missing(tmp_path, "no answer", [snapshot_files.FLIGHT], silent=True)
    snapshot_files.add_missing(
        tmp_path,
        "over (signal 6, aborted)",
        [snapshot_files.STACKS],
        ended=True,
        ended_signal=signal,
    )
    snapshot_files.add_missing(tmp_path, "py-spy failed", [snapshot_files.NATIVE])
    assert read(tmp_path).ended_signal == signal


@pytest.mark.parametrize(
    ("view", "signal", "well"),
    [
        ({"state": "Z", "ended_by": "SIGABRT", "ended_signal": "SIGABRT"}, "SIGABRT", False),
        ({"state": "Z", "ended_by": "exit code 0", "ended_well": True}, None, True),
        ({"state": "Z", "ended_by": "SIGABRT", "ended_signal": 6}, None, False),
        ({"state": "Z", "ended_by": "SIGABRT"}, None, False),  # of an older version
    ],
)
def test_how_the_kernel_saw_a_rank_end(
    tmp_path: Path, view: dict[str, Any], signal: str | None, well: bool
) -> None:
    (tmp_path / snapshot_files.PROCESS).write_text(json.dumps(view))
    rank = read(tmp_path)
    assert (rank.ended_signal, rank.ended_well) == (signal, well)
    assert rank.ended is not None


@pytest.mark.parametrize(
    ("state", "stopped"), [("T", True), ("S", False), ("t", False), (None, False)]
)
def test_whether_a_process_was_stopped(tmp_path: Path, state: str | None, stopped: bool) -> None:
    view = {"state": state, "state_name": "stopped in words", "wchan": "do_signal_stop"}
    (tmp_path / snapshot_files.PROCESS).write_text(json.dumps(view))
    assert read(tmp_path).stopped is stopped


def test_words_alone_prove_neither(tmp_path: Path) -> None:
    reason = "it did not answer: the process died (exit code 0)"
    snapshot_files.add_missing(tmp_path, reason, [snapshot_files.FLIGHT])
    rank = read(tmp_path)
    assert (rank.ended, rank.silent, rank.missing) == (None, False, reason)


@pytest.mark.parametrize("files", [7, {}, [None, 3, "stacks.txt"]])
def test_what_the_script_has_written_there_keeps_no_reason_out(
    files: object, tmp_path: Path
) -> None:
    (tmp_path / snapshot_files.MISSING).write_text(json.dumps({"reason": 5, "files": files}))
    snapshot_files.add_missing(tmp_path, "no answer", [snapshot_files.FLIGHT])
    written = json.loads((tmp_path / snapshot_files.MISSING).read_text())
    assert written["reason"] == "no answer"
    assert written["files"][-1] == snapshot_files.FLIGHT


def test_the_kind_of_a_fault_in_a_damaged_incident_may_be_anything(tmp_path: Path) -> None:
    faults: list[dict[str, object]] = [
        {"initial_rank": rank, "kind": {}, "summary": "boom"} for rank in (0, 1)
    ]
    (tmp_path / "incident.json").write_text(json.dumps({"faults": faults}))
    evidence = FlightEvidence("run")
    rank_files.read_incident(evidence, tmp_path)
    assert evidence.faults == {0: "boom", 1: "boom"}
