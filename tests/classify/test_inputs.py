"""Where logs come from: files, folders, compressed, cut off, torchelastic's error files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from ncclops.classify import classify, classify_paths, inputs
from ncclops.classify.line_ranks import rank_of_path
from ncclops.errors import UsageError
from tests.classify.shipped import LOADED
from tests.conftest import CompletedText
from tests.record.deep_tree import deep_tree

CAUSE = "RuntimeError: CUDA error: an illegal memory access was encountered"
LOG = (
    "\n".join(f"step {i} loss 2.0 tok/s 5" for i in range(50)) + f"\n[rank2]: {CAUSE}\n"
).encode()


@pytest.mark.parametrize("name", ["a.log", "a.log.gz", "a.zst", "no-suffix"])
@pytest.mark.parametrize("packed", ["plain", "gzip", "zstd"])
def test_compression_is_seen_in_the_bytes_not_in_the_name(
    tmp_path: Path, name: str, packed: str
) -> None:
    pack = {
        "plain": lambda data: data,
        "gzip": gzip.compress,
        "zstd": zstandard.ZstdCompressor().compress,
    }[packed]
    (tmp_path / name).write_bytes(pack(LOG))
    report = classify_paths([tmp_path / name], LOADED)
    assert (report.verdict.class_, report.verdict.rank) == ("cuda-error", 2)
    assert (report.evidence[0].line, report.stats.bytes) == (51, len(LOG))


def test_concatenated_archives_are_read_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"step 1\n") + gzip.compress(LOG))
    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"step 1\n") + zstandard.compress(LOG))
    for name in ("a.gz", "a.zst"):
        assert classify_paths([tmp_path / name], LOADED).evidence[0].line == 52


def test_an_archive_cut_in_the_middle_is_read_that_far(tmp_path: Path) -> None:
    noise = "".join(f"{i * 7919 % 104729} noise\n" for i in range(20_000)).encode()
    (tmp_path / "a.gz").write_bytes(gzip.compress(LOG + noise)[:-2000])
    report = classify_paths([tmp_path / "a.gz"], LOADED)
    assert report.verdict.class_ == "cuda-error"
    assert "cut short" in report.notes[0]


def test_a_damaged_archive_is_noted_not_raised(tmp_path: Path) -> None:
    packed = bytearray(zstandard.compress(LOG * 2000))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "a.zst").write_bytes(packed)
    report = classify_paths([tmp_path / "a.zst"], LOADED)
    assert report.stats.files == 1


def test_a_log_of_terabytes_of_holes_is_read_by_its_data(tmp_path: Path) -> None:
    with (tmp_path / "a.log").open("wb") as file:
        file.seek(1 << 40)
        file.write(LOG)
    report = classify_paths([tmp_path / "a.log"], LOADED)
    assert report.verdict.rank == 2


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_what_expands_without_end_is_read_up_to_a_limit_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(inputs, "_MOST_UNPACKED_BYTES", 1 << 20)
    (tmp_path / "a.gz").write_bytes(pack(LOG + bytes(8 << 20) + b"\n" + LOG))
    report = classify_paths([tmp_path / "a.gz"], LOADED)
    assert report.verdict.rank == 2
    [note] = report.notes
    assert "expands to more than 200 times its size" in note


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_so_is_what_comes_through_a_pipe(
    monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(inputs, "_MOST_UNPACKED_BYTES", 1 << 20)
    read, write = os.pipe()
    os.write(write, pack(LOG + bytes(8 << 20) + b"\n" + LOG))  # fits into the pipe
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        monkeypatch.setattr(inputs, "_stdin", lambda: pipe)
        report = classify_paths(["-"], LOADED)
    assert report.verdict.rank == 2
    [note] = report.notes
    assert "expands to more than 200 times its size" in note


def test_a_folder_of_too_many_files_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_MOST_FILES", 5)
    for number in range(6):
        (tmp_path / f"{number}.log").touch()
    with pytest.raises(UsageError, match=r"more than 5 files below .*: name one run"):
        classify_paths([tmp_path], LOADED)


def test_torchrun_log_dir(tmp_path: Path) -> None:
    base = tmp_path / "none_abc" / "attempt_0"
    for rank in range(4):
        (base / str(rank)).mkdir(parents=True)
        (base / str(rank) / "stdout.log").write_bytes(b"step 1 loss 2.0 tok/s 5\n")
        (base / str(rank) / "stderr.log").write_bytes(b"")
    (base / "3" / "stderr.log").write_text(CAUSE + "\n")
    report = classify_paths([tmp_path], LOADED)
    assert (report.verdict.class_, report.verdict.rank) == ("cuda-error", 3)
    assert report.stats.files == 8


def test_error_files_of_torchelastic_date_the_first_failure(tmp_path: Path) -> None:
    for rank, at, message in (
        (1, 1_780_000_060, "EOFError: peer"),
        (2, 1_780_000_000, "KeyError: 'x'"),
    ):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        extra = {"py_callstack": "Traceback ...", "timestamp": str(at)}
        document = {"message": {"message": message, "extraInfo": extra}}
        (folder / "error.json").write_text(json.dumps(document))
    report = classify_paths([tmp_path], LOADED)
    assert (report.verdict.class_, report.verdict.rank) == ("user-error", 2)
    assert report.evidence[0].file.endswith("2/error.json")


@pytest.mark.parametrize(
    "content", ["", "not json", "[1]", '{"message": 3}', '{"message": {"a": 1}}', "[" * 100_000]
)
def test_odd_error_files_are_read_as_text(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "attempt_0" / "0"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text(content)
    assert classify_paths([tmp_path], LOADED).verdict.class_ == "unknown"


def test_an_earlier_attempt_of_torchrun_is_history_once_a_later_one_ran(tmp_path: Path) -> None:
    for attempt, text in ((0, CAUSE + "\n"), (1, "step 1 loss 2.0\nstep 2 loss 2.0\n")):
        folder = tmp_path / "none_x" / f"attempt_{attempt}" / "0"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(text)
    assert classify_paths([tmp_path], LOADED).verdict.class_ == "no-failure-seen"
    (folder / "stderr.log").write_text("starting\n")
    assert classify_paths([tmp_path], LOADED).verdict.class_ == "cuda-error"


def test_one_unreadable_file_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(CAUSE + "\n")
    (tmp_path / "b.log").symlink_to("/proc/self/mem")
    report = classify_paths([tmp_path], LOADED)
    assert report.verdict.class_ == "cuda-error"
    assert report.notes and "b.log was left out" in report.notes[0]


def test_several_paths_are_one_job(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("[rank0]: ncclRemoteError: A call failed\n")
    (tmp_path / "b.log").write_text(f"[rank1]: {CAUSE}\n")
    report = classify_paths([tmp_path / "a.log", tmp_path / "b.log"], LOADED)
    assert (report.verdict.class_, report.verdict.rank) == ("cuda-error", 1)


def test_our_own_records_are_not_read_as_logs(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "fault", "text": "CUDA out of memory"}\n')
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "incidents" / "0").mkdir(parents=True)
    (tmp_path / "incidents" / "0" / "stacks.txt").write_text("Segmentation fault\n")
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    (tmp_path / "ranks" / "0" / "stdout.log").write_text("step 1 loss 1.0\nstep 2 loss 1.0\n")
    report = classify_paths([tmp_path], LOADED)
    assert (report.verdict.class_, report.stats.files) == ("no-failure-seen", 1)


def test_unreadable_input_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nope\.log: No such file"):
        classify_paths([tmp_path / "nope.log"], LOADED)
    with pytest.raises(UsageError, match="no logs below"):
        classify_paths([tmp_path], LOADED)


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("runs/x/ranks/12/stdout.log", 12),
        ("runs/x/ranks/12/stderr.log.gz", 12),
        ("logs/none_q1/attempt_0/3/stderr.log", 3),
        ("logs/rank_7.log", 7),
        ("logs/rank7/out.txt", 7),
        ("logs/train-rank-007.out", 7),
        ("logs/task_7.out", 7),
        ("logs/train.process-7.log", 7),
        ("logs/proc7.log", 7),
        ("logs/r7.log", 7),
        ("logs/deepseek-r1.log", None),
        ("logs/r1-distill.log", None),
        ("logs/multitask_3.log", None),
        ("logs/preprocess3.log", None),
        ("logs/2024/train.log", None),
        ("logs/slurm-77.out", None),
    ],
)
def test_ranks_in_paths(path: str, rank: int | None) -> None:
    assert rank_of_path(Path(path)) == rank


def test_logs_are_found_however_deep_they_are(tmp_path: Path) -> None:
    with deep_tree(tmp_path / "logs", 1500, log=LOG) as logs:
        assert classify_paths([logs], LOADED).verdict.class_ == "cuda-error"


@pytest.mark.parametrize("name", ["nodes.log", "control/server.log"])
def test_notes_of_our_own_processes_are_no_logs_of_the_job(tmp_path: Path, name: str) -> None:
    """They tell of a store that has gone, after the agent that served it was killed."""
    (tmp_path / "ranks/0").mkdir(parents=True)
    (tmp_path / "ranks/0/stderr.log").write_bytes(LOG)
    note = tmp_path / name
    note.parent.mkdir(exist_ok=True)
    note.write_text(
        "W0101 dynamic_rendezvous.py:1346] The node 'h0_1_0' has failed to send a keep-alive"
        " heartbeat to the rendezvous 'none' due to an error of type RendezvousConnectionError.\n"
    )
    report = classify_paths([tmp_path], LOADED)
    assert report.verdict.class_ == "cuda-error"
    assert report.stats.bytes == len(LOG)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_link_to_a_file_of_another_user_is_left_out(tmp_path: Path) -> None:
    """Of root's, say, who reads what anybody has left."""
    directory = tmp_path / "logs"
    directory.mkdir()
    (tmp_path / "foreign").write_bytes(LOG)
    (directory / "own.log").write_text("step 1\n")
    (directory / "link.log").symlink_to(directory / "own.log")
    (directory / "foreign.log").symlink_to(tmp_path / "foreign")
    os.lchown(directory / "foreign.log", 12345, 12345)
    report = classify_paths([directory], LOADED)
    assert report.verdict.class_ != "cuda-error"
    (note,) = report.notes
    assert note == f"{directory / 'foreign.log'} was left out: a link to a file of another user"


@pytest.mark.parametrize(("pack", "program"), [(lzma.compress, "xz"), (bz2.compress, "bzip2")])
@pytest.mark.parametrize("name", ["a.log", "a.log.xz", "a.bz2"])
def test_a_log_that_is_packed_otherwise_is_said_to_be(
    tmp_path: Path, pack: Callable[[bytes], bytes], program: str, name: str
) -> None:
    """As text it would hold no known failure. In a directory the others are read."""
    path = tmp_path / name
    path.write_bytes(pack(LOG * 2000))
    with pytest.raises(UsageError, match=f"compressed with {program}: pipe it through"):
        classify_paths([path], LOADED)
    (tmp_path / "b.log").write_bytes(LOG)
    report = classify_paths([tmp_path], LOADED)
    assert report.verdict.class_ == "cuda-error"
    assert any("left out" in note for note in report.notes)


def test_a_run_is_named_by_its_id(
    tmp_path: Path, ncclops_in_process: Callable[..., CompletedText]
) -> None:
    run = tmp_path / "runs" / "20261126-1"
    (run / "ranks" / "2").mkdir(parents=True)
    (run / "events.jsonl").write_text("")
    (run / "ranks" / "2" / "stderr.log").write_bytes(LOG)
    for name in ("20261126-1", "2026"):
        done = ncclops_in_process("classify", name)
        assert "begun by rank 2" in done.stdout, done.stderr
        assert "runs/20261126-1/ranks/2/stderr.log:51" in done.stdout
    missing = ncclops_in_process("classify", "2025")
    assert "cannot read 2025: No such file" in missing.stderr


def test_the_logs_of_many_runs_are_not_those_of_one_job(
    ncclops_in_process: Callable[..., CompletedText], tmp_path: Path
) -> None:
    """It judged them all together, as if they were one job."""
    for name in ("a", "b"):
        (log := tmp_path / "runs" / name / "ranks" / "0" / "stderr.log").parent.mkdir(parents=True)
        log.write_text("ValueError: x\n")
        (tmp_path / "runs" / name / "events.jsonl").touch()
    done = ncclops_in_process("classify", "runs")
    assert (done.returncode, done.stdout) == (2, "")
    assert "runs holds 2 runs (a, b): name one of them, as in runs/b" in done.stderr
    assert ncclops_in_process("classify", "runs/a").returncode == 0


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_logs_that_programs_of_windows_have_written_are_read(tmp_path: Path, encoding: str) -> None:
    """PowerShell writes UTF-16 with a mark; over the first line of a log, which may be all of it,
    no mark of UTF-8 may stand either."""
    log = tmp_path / "from-kubectl.txt"
    text = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\r\n"
    log.write_bytes((text + "é\r\n" * 200_000).encode(encoding))
    report = classify_paths([log])
    assert (report.verdict.class_, report.verdict.rank) == ("gpu-oom", 1)
    assert report.evidence[0].line == 1
    assert report.evidence[0].text.startswith("[rank1]:")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("[rank1]: CUDA out of memory\n", "give text.splitlines"),
        (b"CUDA out of memory", "give a path, or the lines of a log"),
        (5, "5: give a path, or the lines of a log"),
        ([5], "5 is no line: give text or bytes"),
    ],
)
def test_what_is_neither_a_path_nor_lines_is_refused(source: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        classify(source)


def test_one_path_is_no_list_of_paths_of_a_letter_each(tmp_path: Path) -> None:
    for one in (str(tmp_path), tmp_path, 5):
        with pytest.raises(UsageError, match="give a list of paths"):
            classify_paths(one)  # type: ignore[arg-type]
