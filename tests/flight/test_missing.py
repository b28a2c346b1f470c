"""missing.json: why a rank has left no snapshot, as fields, whatever the words say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.flight import rank_files
from ncclops.flight.model import FlightEvidence, RankEvidence
from ncclops.record import snapshots


def read(folder: Path) -> RankEvidence:
    rank = RankEvidence(3)
    rank_files.read(FlightEvidence("run"), rank, folder)
    return rank


@pytest.mark.parametrize("reason", ["its process has ended (SIGKILL)", "reworded"])
def test_a_rank_whose_process_has_ended(tmp_path: Path, reason: str) -> None:
    snapshots.add_missing(tmp_path, reason, [snapshots.FLIGHT], ended=True)
    rank = read(tmp_path)
    assert (rank.ended, rank.ended_well, rank.silent) == (reason, False, False)


def test_a_rank_that_was_silent_and_then_ended_is_both(tmp_path: Path) -> None:
    snapshots.add_missing(tmp_path, "no answer", [snapshots.FLIGHT], silent=True)
    snapshots.add_missing(tmp_path, "over", [snapshots.STACKS], ended=True, ended_well=True)
    rank = read(tmp_path)
    assert (rank.ended, rank.ended_well, rank.silent) == ("no answer; over", True, True)


def test_words_alone_prove_neither(tmp_path: Path) -> None:
    reason = "it did not answer: the process died (exit code 0)"
    snapshots.add_missing(tmp_path, reason, [snapshots.FLIGHT])
    rank = read(tmp_path)
    assert (rank.ended, rank.silent, rank.missing) == (None, False, reason)
