"""What leaves the machine is searched for the secrets of a run and of this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.record.environment_record import ENVIRONMENT, EnvSnapshot
from ncclops.record.paths import RunPaths
from ncclops.redaction.marks import mark_of
from ncclops.redaction.of_run import redactor_of


def test_values_of_ranks_and_of_this_process_are_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPS_TOKEN", "plain.battery")
    paths = RunPaths(tmp_path)
    ranks = paths.rank(0), RunPaths(paths.of_node("n1")).rank(1)
    for rank, secret in zip(ranks, ("correct.horse", "other.staple"), strict=True):
        rank.root.mkdir(parents=True)
        snapshot = EnvSnapshot(label="rank", variables={}, marks=[mark_of(secret)])
        ENVIRONMENT.write(rank.environment, snapshot)
    paths.rank(2).root.mkdir()
    paths.rank(2).environment.write_text("{")  # damaged: the others count all the same
    said = redactor_of(paths).text("correct.horse other.staple plain.battery public")
    assert said.endswith(" public")
    assert not {"correct.horse", "other.staple", "plain.battery"} & {*said.split()}
