"""How a worker is asked for a snapshot: what is damaged is as if it were not there."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from ncclops.capture.run_snapshots import collect_run
from ncclops.capture.signal_stacks import StackDumper, dump_stacks
from ncclops.diagnose.live_ranks import live_ranks
from ncclops.host import process_view
from ncclops.record import snapshot_server_record
from ncclops.record.paths import RunPaths
from ncclops.record.snapshot_server_record import SnapshotServerRecord


def ours() -> SnapshotServerRecord:
    """This process, which has no snapshot server."""
    stat = process_view.read_stat(Path("/proc/self"))
    assert stat is not None
    return SnapshotServerRecord(
        rank=0,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_ticks=stat.started_ticks,
        address="no-such-socket",
        device={"LOCAL_RANK": "0"},
    )


def test_it_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = RunPaths(tmp_path).rank(0).snapshot_server
    snapshot_server_record.write(path, ours())
    assert snapshot_server_record.read(path) == ours()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_a_later_version": 1}))
    assert snapshot_server_record.read(path) == ours()
    assert live_ranks(tmp_path) == [0]


@pytest.mark.parametrize("other", [{"started_ticks": 1}, {"boot_id": "before"}], ids=repr)
def test_another_process_of_the_same_number_is_not_taken_for_it(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    path = RunPaths(tmp_path).rank(0).snapshot_server
    snapshot_server_record.write(path, structs.replace(ours(), **other))
    assert live_ranks(tmp_path) == []
    found = collect_run(tmp_path, [0], tmp_path / "out")
    assert found.missing == (0,) and "has ended" in found.reasons[0]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGRTMIN + 9])
def test_no_process_without_our_memory_file_is_signalled_and_no_file_of_it_cut(
    tmp_path: Path, number: int
) -> None:
    """What a rank has recorded names a process, a descriptor and a signal of others."""
    taken = list[int]()
    before = signal.signal(number, lambda signum, _: taken.append(signum))
    try:
        with (tmp_path / "precious").open("w+b") as file:
            file.truncate(5 << 20)
            dumper = StackDumper(os.getpid(), os.getpid(), number, file.fileno(), 0)
            assert dump_stacks(dumper, 0.2) is None
            assert os.fstat(file.fileno()).st_size == 5 << 20
    finally:
        signal.signal(number, before)
    assert taken == []


@pytest.mark.parametrize("name", SnapshotServerRecord.__struct_fields__)
@pytest.mark.parametrize("wrong", [None, True, "7", -1, 10**40, [], {"a": 1}], ids=repr)
def test_a_field_of_another_type_is_no_fault(tmp_path: Path, name: str, wrong: Any) -> None:
    path = RunPaths(tmp_path).rank(0).snapshot_server
    snapshot_server_record.write(path, ours())
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: wrong}))
    found = snapshot_server_record.read(path)
    assert found is None or getattr(found, name) == wrong
    assert live_ranks(tmp_path) in ([], [0])


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null"])
def test_a_rank_whose_file_is_damaged_is_one_that_does_not_answer(
    tmp_path: Path, content: str
) -> None:
    path = RunPaths(tmp_path).rank(0).snapshot_server
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert snapshot_server_record.read(path) is None
    assert live_ranks(tmp_path) == []
    taken = collect_run(tmp_path, [0], tmp_path / "where")
    assert taken.missing == (0,)
    assert "has not started its snapshot server yet" in taken.reasons[0]
