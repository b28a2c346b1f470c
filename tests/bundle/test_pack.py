"""What goes into an archive and what does not, from a run directory made to measure."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from ncclops.bundle.pack import pack


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "ranks" / "0").mkdir(parents=True)
    (run / "run.json").write_text('{"schema": "ncclops.run/1"}')
    (run / "events.jsonl").write_text('{"ts": 1.0, "event": "run-started"}\n')
    (run / "ranks" / "0" / "stdout.log").write_text("token=abcdefg12345678\nstep 1\n")
    (run / "model.bin").write_bytes(b"weights")
    return run


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as tar:
        return set(tar.getnames())


def test_records_go_in_and_what_else_lies_there_does_not(run: Path, tmp_path: Path) -> None:
    packed = pack(run, tmp_path / "run.tar.gz")
    inside = names(tmp_path / "run.tar.gz")
    assert {"run/run.json", "run/events.jsonl", "run/ranks/0/stdout.log"} <= inside
    assert "run/model.bin" not in inside
    assert [left["path"] for left in packed.manifest()["left_out"]] == ["model.bin"]


def test_no_secret_goes_in(run: Path, tmp_path: Path) -> None:
    pack(run, tmp_path / "run.tar.gz")
    with tarfile.open(tmp_path / "run.tar.gz") as tar:
        file = tar.extractfile("run/ranks/0/stdout.log")
        assert file is not None
        text = file.read().decode()
    assert "abcdefg12345678" not in text
    assert text.endswith("step 1\n")


def test_the_owner_alone_can_read_it(run: Path, tmp_path: Path) -> None:
    pack(run, tmp_path / "run.tar.gz")
    assert (tmp_path / "run.tar.gz").stat().st_mode & 0o777 == 0o600
