"""The small documents of a rank's snapshot: what each says, and nothing where it is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclops.record import snapshot_files, snapshot_records
from ncclops.record.snapshot_records import MissingRecord, ProcessRecord

OPERATION = {"op": "all_reduce", "seq": 6, "pending": True, "at": 20.0}


def write(directory: Path, name: str, document: object) -> None:
    (directory / name).write_text(json.dumps(document))


def test_the_newest_operation_of_all_groups(tmp_path: Path) -> None:
    groups = [
        {"name": "0", "desc": "default_pg", "ranks": [0, 1], "last_op": OPERATION},
        {"name": "1", "desc": "dp", "last_op": OPERATION | {"op": "broadcast", "at": 21.0}},
        {"name": "2", "desc": "tp"},
    ]
    write(tmp_path, snapshot_files.GROUPS, groups)
    last = snapshot_records.last_operation(tmp_path)
    assert last is not None
    assert (last.op, last.seq, last.pending, last.name, last.desc) == (
        "broadcast",
        6,
        True,
        "1",
        "dp",
    )


def test_a_group_that_is_damaged_is_left_out(tmp_path: Path) -> None:
    without_time = {name: value for name, value in OPERATION.items() if name != "at"}
    damaged = [{"last_op": without_time}, {"last_op": []}, {"name": 3, "last_op": OPERATION}]
    write(tmp_path, snapshot_files.GROUPS, [*damaged, {"name": "0", "last_op": OPERATION}])
    last = snapshot_records.last_operation(tmp_path)
    assert last is not None and last.name == "0"


def test_the_process_what_is_missing_and_the_logs(tmp_path: Path) -> None:
    write(tmp_path, snapshot_files.PROCESS, {"host": "n1", "pid": 7, "threads": []})
    write(tmp_path, snapshot_files.MISSING, {"reason": "it has ended", "files": []})
    write(tmp_path, snapshot_files.LOGS, {"stdout.log": 0, "stderr.log": 167})
    assert snapshot_records.process(tmp_path) == ProcessRecord(host="n1", pid=7)
    assert snapshot_records.missing(tmp_path).reason == "it has ended"
    assert snapshot_records.log_sizes(tmp_path) == {"stdout.log": 0, "stderr.log": 167}


@pytest.mark.parametrize(
    "document", [None, [], {"host": 1, "reason": {}, "stdout.log": "x"}, "text"]
)
def test_what_is_damaged_says_nothing(document: object, tmp_path: Path) -> None:
    for name in (snapshot_files.GROUPS, snapshot_files.PROCESS, snapshot_files.MISSING):
        write(tmp_path, name, document)
    write(tmp_path, snapshot_files.LOGS, document)
    assert snapshot_records.last_operation(tmp_path) is None
    assert snapshot_records.process(tmp_path) == ProcessRecord()
    assert snapshot_records.missing(tmp_path) == MissingRecord()
    assert snapshot_records.log_sizes(tmp_path) == {}
