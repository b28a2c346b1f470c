"""Any folder of dumps: names, forms, versions; and files made to hurt the reader."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.errors import UsageError
from ncclops.flight import analyze
from ncclops.flight.reader import read_files
from ncclops.flight.sources import gather, rank_of
from tests.flight import dumps
from tests.flight.dumps import entry

pytestmark = pytest.mark.slow

WORLD = dumps.WORLD
MEMBERS = {WORLD: [0, 1, 2]}


def test_where_no_process_starts_one_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps.write_pickles(tmp_path, hung(), "nccl_trace_rank_")
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    with pytest.raises(UsageError, match=r"no process starts: No such file"):
        analyze(tmp_path)


def hung(version: str = "2.10") -> dict[int, dict[str, Any]]:
    """Three ranks, of which 1 did not enter operation 3."""
    made = {r: [entry(1), entry(2), entry(3, state="scheduled")] for r in (0, 2)}
    made[1] = [entry(1), entry(2)]
    return {rank: dumps.dump(made[rank], MEMBERS, version) for rank in range(3)}


def as_strings(value: Any) -> Any:
    """As some writers of JSON have it: numbers and truth values in quotes."""
    if isinstance(value, dict):
        return {key: as_strings(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_strings(item) for item in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else value


def culprits(path: Path) -> tuple[int, ...]:
    finding = analyze(path).findings[0]
    assert finding.kind == "never-arrived"
    return finding.culprits


@pytest.mark.parametrize(
    "prefix", ["nccl_trace_rank_", "comm_lib_trace_rank_", "my-job.2024_", "trace", "rank"]
)
def test_names_that_end_in_the_rank(tmp_path: Path, prefix: str) -> None:
    """torch's own names of all releases, and any prefix that a user chose."""
    dumps.write_pickles(tmp_path, hung(), prefix)
    assert culprits(tmp_path) == (1,)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("comm_lib_trace_rank_12.json.gz", 12),
        ("trace_2024_7", 7),
        ("rank3_host12.json", 3),
        ("rank_4/flight.json", 4),
        ("flight.json", None),
    ],
)
def test_the_rank_in_a_name(name: str, rank: int | None) -> None:
    """The number after the word, else the last one, else the folder's."""
    assert rank_of(Path("dumps") / name) == rank


@pytest.mark.parametrize("version", ["2.4", "2.9", "2.10"])
@pytest.mark.parametrize("form", ["pickle", "json", "json.gz", "pickle.gz", "wrapped", "strings"])
def test_forms_and_versions(tmp_path: Path, form: str, version: str) -> None:
    """Keys moved between the versions; all forms say the same."""
    for rank, made in hung(version).items():
        if version == "2.4":
            made["nccl_version"] = made.pop("comm_lib_version")
            for old in made["entries"]:
                del old["timeout_ms"], old["is_p2p"]
        if form == "strings":
            made["entries"] = [as_strings(e) | {"state": e["state"]} for e in made["entries"]]
        held = made
        if form == "wrapped":
            stamp = {"rank": rank, "host": "n", "pid": 1, "taken_at": None}
            held = stamp | {"dump": json.dumps(made)}
        data = pickle.dumps(held, 2) if "pickle" in form else json.dumps(held).encode()
        data = gzip.compress(data) if form.endswith("gz") else data
        (tmp_path / f"dump_{rank}.{form}").write_bytes(data)
    assert culprits(tmp_path) == (1,)


def test_one_folder_per_node(tmp_path: Path) -> None:
    """Dumps are gathered from the disks of nodes."""
    for rank, made in hung().items():
        dumps.write_pickles(tmp_path / f"node{rank}", {rank: made}, "nccl_trace_rank_")
    assert culprits(tmp_path) == (1,)


def test_what_else_lies_in_the_folder_is_passed_over(tmp_path: Path) -> None:
    """Logs, configurations, notes, checkpoints."""
    dumps.write_pickles(tmp_path, hung(), "nccl_trace_rank_")
    (tmp_path / "config.json").write_text('{"lr": 1}')
    (tmp_path / "train.log").write_text("step 1\n")
    (tmp_path / "events.jsonl").write_text('{"event": "step"}\n')
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / ".hidden_rank_9").write_bytes(b"\x80")
    report = analyze(tmp_path)
    assert (report.findings[0].culprits, report.evidence.skipped) == ((1,), [])


@pytest.mark.parametrize("name", ["stacks_rank_1.txt", "py-spy/rank1.log"])
def test_stacks_beside_bare_dumps_are_read(tmp_path: Path, name: str) -> None:
    """Somebody ran py-spy on each rank and kept what it printed."""
    dumps.write_pickles(tmp_path, hung(), "nccl_trace_rank_")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(
        'Thread 812 (idle): "MainThread"\n'
        "    wait (threading.py:320)\n"
        "    load_batch (/home/user/train.py:57)\n"
        "    <module> (/home/user/train.py:90)\n"
    )
    assert "train.py:57 load_batch" in analyze(tmp_path).sentence


def test_two_generations_of_dumps(tmp_path: Path) -> None:
    """Of a rank with several dumps the newest counts."""
    dumps.write_pickles(tmp_path, {r: dumps.dump([entry(1)], MEMBERS) for r in range(3)}, "old_")
    for file in tmp_path.iterdir():
        os.utime(file, (dumps.BEGUN_S, dumps.BEGUN_S))
    dumps.write_pickles(tmp_path, hung(), "new_")
    report = analyze(tmp_path)
    assert report.findings[0].culprits == (1,)
    assert any("several dumps" in note for note in report.notes)


def test_one_damaged_file_costs_only_its_rank(tmp_path: Path) -> None:
    """A rank that was killed while it wrote; the rest is read, and the file is named."""
    dumps.write_pickles(tmp_path, hung(), "nccl_trace_rank_")
    damaged = tmp_path / "nccl_trace_rank_2"
    damaged.write_bytes(damaged.read_bytes()[:200])
    report = analyze(tmp_path)
    assert report.findings[0].culprits == (1,)
    [(file, reason)] = report.evidence.skipped
    assert file == str(damaged) and "cut short" in reason


class _Runs:
    """Pickles into a call of a function of ours: what a malicious dump would do."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._target),)


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    """It is named and left alone."""
    trace, ran = tmp_path / "nccl_trace_rank_0", tmp_path / "ran"
    made = dumps.dump([entry(1)]) | {"pg_status": _Runs(ran)}
    trace.write_bytes(pickle.dumps(made))
    with pytest.raises(UsageError, match=r"nccl_trace_rank_0: a pickle that wants to run 'posix"):
        gather(trace)
    assert not ran.exists()


def nested_pickle(levels: int) -> bytes:
    """A dictionary whose key is a tuple of two of the same tuple, and so on: hashing takes 2^n."""
    body = b"\x80\x02)"
    for _ in range(levels):
        body += b"2\x86"  # dup, make a pair
    return b"\x80\x02}" + body[2:] + b"Ns."


BOMBS = {
    "memo": b"\x80\x02}r" + struct.pack("<I", 0xFFFFFFF0) + b".",
    "long string": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "deep list": b"\x80\x02" + b"]" * 2_000_000 + b"a" * 1_999_999 + b".",
    "persistent": b"\x80\x02U\x01xQ.",
    "extension": b"\x80\x02\x82\x01.",
    "object": b"\x80\x02c__builtin__\neval\n(U\x031+1tR.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_bombs(tmp_path: Path, bomb: str) -> None:
    """A few bytes that ask for gigabytes, or for code."""
    path = tmp_path / "rank_0"
    path.write_bytes(BOMBS[bomb])
    with pytest.raises(UsageError, match=r"rank_0: ") as raised:
        gather(path)
    assert "\n" not in str(raised.value)


def test_a_pickle_that_never_ends_is_given_up(tmp_path: Path) -> None:
    """Work that no limit on memory stops: the process is, and the next file is still read."""
    (tmp_path / "rank_0").write_bytes(nested_pickle(64))
    dumps.write_pickles(tmp_path, {1: dumps.dump([entry(1)], MEMBERS)}, "rank_")
    files = [(tmp_path / f"rank_{rank}", rank) for rank in (0, 1)]
    first, second = read_files(files, limit=timedelta(seconds=1))
    assert "more CPU to read than any dump of its size" in first.reason
    assert second.record is not None


@pytest.mark.timeout(50)
def test_a_small_file_gets_little_time(tmp_path: Path) -> None:
    """By itself, within less than the limit for the largest dumps."""
    (tmp_path / "rank_0").write_bytes(nested_pickle(64))
    (result,) = read_files([(tmp_path / "rank_0", 0)])
    assert "more CPU to read than any dump of its size" in result.reason


def test_a_directory_of_such_pickles_is_given_up(tmp_path: Path) -> None:
    """Thousands of them would take days."""
    for rank in range(6):
        (tmp_path / f"rank_{rank}").write_bytes(nested_pickle(64))
    files = [(tmp_path / f"rank_{rank}", rank) for rank in range(6)]
    results = read_files(files, limit=timedelta(seconds=0))
    assert all("more CPU" in each.reason for each in results[:3])
    assert all("left out" in each.reason for each in results[3:])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"\0" * 4096, "empty"),
        (b"[1, 2]", "no dictionary"),
        (b'{"entries": 7}', "no list"),
        (b'{"entries": [7]}', "entry 0"),
        (b'{"entries": [{}]}', "no 'process_group'"),
        (b'{"entries": [], "version": ' + b"[" * 100_000, "nested"),
        (b'{"entries": [', "cut short"),
        (b"\x1f\x8b\x08garbage", "gzip"),
        (b"hello", "neither a pickle nor JSON"),
        (gzip.compress(b" " * (257 << 20), 1), "256 MiB"),
    ],
)
def test_what_is_no_dump_is_one_clear_line(tmp_path: Path, content: bytes, why: str) -> None:
    """The file and the reason, whatever is in it."""
    path = tmp_path / "trace_rank_0"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=why) as raised:
        gather(path)
    assert "trace_rank_0" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"collective_seq_id": -(1 << 70)},
        {"collective_seq_id": None},
        {"input_sizes": [[None]]},
        {"input_sizes": {"a": 1}},
        {"process_group": "0"},
        {"profiling_name": ["x"]},
        {"state": "dancing"},
        {"frames": [{"name": 1}]},
        {"frames": 7},
        {"time_created_ns": "soon"},
    ],
)
def test_wrong_types_name_the_entry(tmp_path: Path, change: dict[str, Any]) -> None:
    """One wrong value in thousands of entries."""
    made = dumps.dump([entry(1), entry(2) | change])
    (tmp_path / "trace_rank_0.json").write_text(json.dumps(made))
    with pytest.raises(UsageError, match="entry 1 "):
        gather(tmp_path)


def test_a_device_or_pipe_is_not_opened(tmp_path: Path) -> None:
    """It would never end, or block."""
    os.mkfifo(tmp_path / "trace_rank_0")
    with pytest.raises(UsageError, match="no dumps"):
        gather(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    """A path that is wrong, and a folder without dumps."""
    with pytest.raises(UsageError, match="there is no"):
        gather(tmp_path / "absent")
    with pytest.raises(UsageError, match="no dumps of a flight recorder below"):
        gather(tmp_path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("fuzz")


ORIGINALS = [pickle.dumps(hung()[0], 2), json.dumps(hung()[0]).encode()]
MUTATIONS = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 255), st.integers(0, 3)), max_size=6
)


def mutate(data: bytes, changes: list[tuple[int, int, int]]) -> bytes:
    """Bytes replaced, inserted, deleted, or everything after cut off."""
    changed = bytearray(data)
    for place, value, how in changes:
        at = place % (len(changed) + 1)
        if how == 0 and at < len(changed):
            changed[at] = value
        elif how == 1:
            changed.insert(at, value)
        elif how == 2:
            del changed[at : at + 1 + value % 8]
        elif value < 32:
            del changed[at:]
    return bytes(changed)


@settings(max_examples=12)
@given(original=st.sampled_from(ORIGINALS), changes=st.lists(MUTATIONS, min_size=12, max_size=12))
def test_mutated_dumps_are_read_or_refused(
    scratch: Path, original: bytes, changes: list[list[tuple[int, int, int]]]
) -> None:
    """Whatever a fuzzer makes of a dump: a record, or one line; never an escape."""
    files = []
    for rank, change in enumerate(changes):
        path = scratch / f"trace_rank_{rank}"
        path.write_bytes(mutate(original, change))
        files.append((path, rank))
    for result in read_files(files, limit=timedelta(seconds=30)):
        assert (result.record is None) == bool(result.reason)
        assert "\n" not in result.reason


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = sorted(entry(1))


@settings(max_examples=12)
@given(
    changes=st.lists(
        st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3), max_size=4
    ),
    config=VALUES,
)
def test_wrong_values_are_read_or_refused(
    scratch: Path, changes: list[dict[str, Any]], config: Any
) -> None:
    """Well-formed JSON with values of any type in any place; what is read can be judged."""
    made = hung()
    made[0]["entries"] += [entry(9) | change for change in changes]
    made[1]["pg_config"] = config
    for rank, content in made.items():
        (scratch / f"trace_rank_{rank}").write_text(json.dumps(content))
    for rank in range(3, 12):
        (scratch / f"trace_rank_{rank}").unlink(missing_ok=True)
    report = analyze(scratch)
    json.dumps(report.to_json())
