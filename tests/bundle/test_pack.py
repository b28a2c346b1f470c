"""What goes into an archive and what does not, from a run directory made to measure."""

from __future__ import annotations

import tarfile
import threading
import time
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


def test_stacks_that_somebody_has_asked_for_go_in(run: Path, tmp_path: Path) -> None:
    """Of a job that hung they may be all that shows where."""
    stacks = run / "where/0/rank0/stacks.txt"
    stacks.parent.mkdir(parents=True)
    stacks.write_text("File train.py, line 3\n")
    pack(run, tmp_path / "run.tar.gz")
    assert "run/where/0/rank0/stacks.txt" in names(tmp_path / "run.tar.gz")


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


@pytest.mark.parametrize("name", [".tgz", "..tgz", "...", ".x.tar.gz", "run.tgz"])
def test_whatever_the_archive_is_called_members_stay_below_one_folder(
    name: str, run: Path, tmp_path: Path
) -> None:
    archive = tmp_path / name
    pack(run, archive)
    with tarfile.open(archive) as tar:
        members = tar.getnames()
    folders = {member.partition("/")[0] for member in members}
    assert len(folders) == 1
    assert folders.isdisjoint({"", ".", ".."})
    assert not any(".." in member.split("/") for member in members)


@pytest.mark.parametrize("levels", [300, 700, 200_000])
def test_documents_of_too_many_levels_say_that_they_are_left_out(
    levels: int, run: Path, tmp_path: Path
) -> None:
    deep = '{"password": "hunter2", "more": ' * levels + "1" + "}" * levels
    (run / "ranks" / "0").mkdir(parents=True, exist_ok=True)
    (run / "verdict.json").write_text(deep)
    (run / "ranks" / "0" / "worker.jsonl").write_text(f'{deep}\n{{"after": 1}}\n')
    archive = tmp_path / "run.tgz"
    pack(run, archive)
    with tarfile.open(archive) as tar:
        for name, lines in (("verdict.json", 1), ("ranks/0/worker.jsonl", 2)):
            member = tar.extractfile(f"run/{name}")
            assert member is not None
            text = member.read().decode()
            assert "hunter2" not in text
            if levels > 300:
                assert f"{len(deep)}" in text or f"{len(deep) + 1}" in text
                assert "JSON of too many levels" in text
                assert len(text.splitlines()) == lines


def test_a_flood_of_files_keeps_no_bundle_from_being_made(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncclops.bundle.pack._MOST_IN_FOLDER", 3)
    for number in range(8):
        (run / "ranks" / "0" / f"step-{number}.txt").touch()
    (run / "ranks" / "1").mkdir()
    (run / "ranks" / "1" / "stdout.log").touch()
    packed = pack(run, tmp_path / "run.tar.gz").manifest()
    assert {"path": "ranks/0", "why": "6 more files are there"} in packed["left_out"]
    assert "run/ranks/1/stdout.log" in names(tmp_path / "run.tar.gz")


def test_a_file_of_the_archives_name_with_partial_behind_it_is_left_alone(
    run: Path, tmp_path: Path
) -> None:
    """It is another bundle's that is under way, or the user's own."""
    other = tmp_path / "run.tar.gz.partial"
    other.write_text("mine")
    pack(run, tmp_path / "run.tar.gz")
    assert other.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.tar.gz", other.name]


def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(run: Path, tmp_path: Path) -> None:
    """Who has made the run swaps it again and again while the reader makes bundles."""
    private = tmp_path / "private"
    private.mkdir()
    for number in range(50):
        (run / "ranks" / "0" / f"{number}.log").write_text("of the run\n")
        (private / f"{number}.log").write_text("of the reader\n")
    rank, aside, over = run / "ranks" / "0", run / "aside", threading.Event()

    def swap() -> None:
        while not over.is_set():
            rank.rename(aside)
            rank.symlink_to(private)
            time.sleep(0.001)
            rank.unlink()
            aside.rename(rank)
            time.sleep(0.001)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for number in range(50):
            archive = tmp_path / f"{number}.tar.gz"
            pack(run, archive)
            with tarfile.open(archive) as tar:
                files = [tar.extractfile(member) for member in tar]
                assert not any(file and b"of the reader" in file.read() for file in files)
    finally:
        over.set()
        swapping.join()
