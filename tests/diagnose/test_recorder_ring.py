"""What is kept of a recorder's ring: the present iteration, and not more than can be read."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ncclops.capture import flight_recorder, process_groups
from ncclops.capture.flight_recorder import RawDump, RecorderMark
from ncclops.capture.rank_snapshot import Identity, RankSnapshot
from ncclops.flight.parse import parse
from ncclops.flight_recorders import GLOO, SECOND_OF_NCCL
from ncclops.record import snapshot_files


def entry(number: int, pg_id: int, at: int, *, retired: bool = True) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": pg_id,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": at,
        "retired": retired,
        "frames": [{"name": "f", "filename": "train.py", "line": n} for n in range(60)],
    }


def dump_of(entries: list[dict[str, Any]], status: dict[str, Any] | None = None) -> RawDump:
    content = {"version": "2.10", "entries": entries, "pg_status": status or {}, "pg_config": {}}
    return RawDump(GLOO, pickle.dumps(content))


def test_entries_of_an_earlier_iteration_are_left_out() -> None:
    """Its groups have the same names and the same numbers, which would confuse every analyser."""
    status = {str(pg): {"last_enqueued_collective": 3} for pg in (0, 1, 2)}
    raw = dump_of([entry(1, 0, 100), entry(2, 0, 200), entry(1, 1, 300)], status)
    read = raw.read(since_ns=250)
    assert [each["pg_id"] for each in read["entries"]] == [1]
    assert set(read["pg_status"]) == {"1", "2"}, "and a group that has done nothing yet"


def status(enqueued: int, completed: int) -> dict[str, int]:
    return {"last_enqueued_collective": enqueued, "last_completed_collective": completed}


def test_a_dump_after_the_abort_is_read_as_of_the_mark() -> None:
    """By then what was pending has ended, and the next iteration has begun."""
    mark = RecorderMark(at_ns=300, status={"0": status(2, 1), "1": status(1, 1)})
    entries = [entry(1, 0, 100), entry(2, 0, 200), entry(1, 1, 250), entry(1, 2, 400)]
    after = {"0": status(2, 2), "1": status(1, 1), "2": status(1, 1)}
    read = RawDump(GLOO, dump_of(entries, after).pickled, mark).read(since_ns=0)
    assert [(each["pg_id"], each["retired"]) for each in read["entries"]] == [
        (0, True),
        (0, False),
        (1, True),
    ]
    assert read["pg_status"] == mark.status


@pytest.mark.parametrize(
    ("before", "after", "pending"),
    [
        (3, 3, set()),  # all done
        (2, 3, {3}),  # the abort ended the last one
        (2, 2, set()),  # the second was reported last; the third was done as well
        (1, 3, {2, 3}),  # two under way, of a loop that waits for neither
        (3, 2, {2}),  # the third was done before the second
    ],
)
def test_what_was_pending_follows_from_what_the_abort_ended(
    before: int, after: int, pending: set[int]
) -> None:
    mark = RecorderMark(at_ns=1000, status={"0": status(3, before)})
    entries = [entry(n, 0, n) for n in (1, 2, 3)]
    raw = dump_of(entries, {"0": status(3, after)})
    read = RawDump(raw.recorder, raw.pickled, mark).read(since_ns=0)
    assert {e["record_id"] for e in read["entries"] if not e["retired"]} == pending
    done = max({1, 2, 3} - pending)
    assert read["pg_status"]["0"]["last_completed_collective"] == max(before, done)
    assert mark.is_ambiguous == (before == 1)


def test_what_the_abort_did_not_end_is_pending() -> None:
    mark = RecorderMark(at_ns=1000, status={"0": status(2, 1)})
    stuck = dump_of([entry(1, 0, 1), entry(2, 0, 2, retired=False)], {"0": status(2, 1)})
    read = RawDump(stuck.recorder, stuck.pickled, mark).read(since_ns=0)
    assert [each["retired"] for each in read["entries"]] == [True, False]


def test_frames_are_kept_where_they_are_needed() -> None:
    entries = [entry(n, 0, n) for n in range(1, 201)]
    entries[3]["retired"] = False
    read = dump_of(entries).read(since_ns=0)
    with_frames = [each["record_id"] for each in read["entries"] if "frames" in each]
    assert with_frames == [4, *range(169, 201)]
    assert max(len(each.get("frames", [])) for each in read["entries"]) <= 24


def test_a_ring_of_any_size_is_bounded() -> None:
    entries = [{"record_id": n, "pg_id": 0, "time_created_ns": n + 1} for n in range(30_000)]
    read = dump_of(entries).read(since_ns=0)
    assert len(read["entries"]) == 10_000
    assert read["entries"][-1]["record_id"] == 29_999
    assert read["entries_dropped"] == 20_000


def test_groups_get_the_status_that_the_recorder_has_of_them() -> None:
    described = [
        {"name": "0", "last_enqueued": 5, "last_started": None, "last_completed": None},
        {"name": "1", "last_enqueued": 0, "last_started": None, "last_completed": None},
    ]
    status = {"3": {"last_enqueued_collective": "7", "last_completed_collective": 6}}
    status["3"]["last_started_collective"] = -1
    last = entry(7, 3, 2_000_000_000, retired=False)
    process_groups.add_status(described, {"entries": [entry(6, 3, 1), last], "pg_status": status})
    assert described[0]["last_enqueued"] == 7
    assert (described[0]["last_started"], described[0]["last_completed"]) == (None, 6)
    assert described[0]["last_op"] == {"op": "all_reduce", "seq": 7, "pending": True, "at": 2.0}
    assert "last_op" not in described[1]


def of_second_engine(seq: int, op_id: int, op: str, **more: Any) -> dict[str, Any]:
    """An entry of torch's second engine: a message has the number of the collective before it."""
    made = entry(seq, 0, op_id + 1) | {"op_id": op_id, "profiling_name": f"nccl2:{op}"}
    return made | {"state": "completed", "is_p2p": "->" in op} | more


def test_the_second_engines_status_is_told_in_numbers_of_collectives() -> None:
    """Its own counts messages as well, from 0 on, and has those of a batch done at once."""
    entries = [
        of_second_engine(1, 0, "all_reduce"),
        of_second_engine(1, 1, "send 0->1"),
        of_second_engine(2, 2, "all_reduce", retired=False, state="scheduled"),
        of_second_engine(2, 3, "send 0->1"),
    ]
    dump = dump_of(entries, {"0": status(3, 3), "1": status(-1, -1)})
    read = RawDump(SECOND_OF_NCCL, dump.pickled).read(since_ns=0)
    unknown = {"last_started_collective": -1}
    assert read["pg_status"] == {"0": status(2, 1) | unknown, "1": status(-1, -1) | unknown}


def test_each_recorder_that_holds_something_has_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's are first, whichever engine; ``flight analyze`` reads them all."""
    held = {"gloo": [entry(1, 0, 1) | {"state": "scheduled"}]}
    module = ModuleType("recorder")
    module.ProcessGroupNCCL2 = module._reset_fr_trace = object()  # type: ignore[attr-defined]
    module._dump_nccl_trace = lambda *_: dump_of(held.get("nccl", [])).pickled  # type: ignore[attr-defined]
    module._dump_fr_trace = lambda *_, backend="gloo": dump_of(held.get(backend, [])).pickled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))

    def backends(name: str) -> dict[str, list[str]]:
        """Of the groups, as read from each file of a snapshot that is taken now."""
        snapshot = RankSnapshot(Identity(0, None), since_ns=0)
        snapshot.take(limit_s=10)
        snapshot.write(tmp_path / name)
        found = {}
        for each in sorted((tmp_path / name).glob("flight*")):
            record = parse(each.read_bytes(), rank=None, file=each.name)
            found[each.name] = [group.backend for group in record.tracks]
        return found

    assert backends("gloo") == {snapshot_files.FLIGHT: ["gloo"]}
    held["nccl2"] = [of_second_engine(1, 0, "all_reduce")]
    both = {snapshot_files.FLIGHT: ["nccl2"], snapshot_files.FLIGHT_GLOO: ["gloo"]}
    assert backends("second") == both
    held["nccl"] = [entry(1, 0, 1) | {"state": "completed", "profiling_name": "nccl:all_reduce"}]
    more = {snapshot_files.FLIGHT: ["nccl"], snapshot_files.FLIGHT_NCCL2: ["nccl2"]}
    assert backends("all") == both | more


def test_without_torch_there_is_nothing_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d", raising=False)
    assert flight_recorder.dump() == []
    assert process_groups.groups() == []
