"""What nodes write into the job's store: one type for each value, read back alike."""

from __future__ import annotations

import json
import typing
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.agent.stop_agreement import StopWay
from ncclops.classify.policy import PastAttempt
from ncclops.cluster import records, store_values
from ncclops.cluster.fingerprint import Fingerprint
from ncclops.cluster.records import LostRecord, Record, StopVoteRecord, UnknownRecord
from ncclops.cluster.round_state import RoundState
from ncclops.cluster.store_values import JobClaim, NodeFacts, RankClaim
from ncclops.decision.deciding import AttemptDecision
from ncclops.decision.node_end import NodeEnd
from ncclops.health.evidence import Kind
from ncclops.health.hang import HangFinding
from ncclops.health.liveness import NodeView
from ncclops.health.paces import RankPace
from ncclops.timeouts.model import Window

PAST = PastAttempt(class_="peer-exit", signature="x", policy="retry", progressed=True)
RECORDS: list[Record] = [
    records.WaitingRecord(node=0, here=["n0", "n 2"], missing=[1]),
    records.StartRecord(
        node=0,
        names=["n0", "n1"],
        addresses=["10.0.0.1", "fe80::1"],
        attempt=3,
        history=[PAST],
        store=("n0", 4711),
        external=True,
        prefix="ncclops/job/1",
        remarks=["Python: should be the same"],
    ),
    records.RefusedRecord(node=0, names=["NCCL"], lines=["NCCL: chooses", "    n0  2.20"]),
    records.RefusedRecord(node=0, names=[], lines=[], why="n1: gpu.ecc GPU 3"),
    records.CheckRecord(node=0, meeting="job/5f", names=["n0", "n1"]),
    records.LeftOutRecord(node=0, nodes={1: "gpu.ecc GPU 3"}),
    records.FailedRecord(node=1, rank=5, how="was killed by SIGKILL", lines=["last"]),
    records.FaultRecord(node=1, rank=5, how="exited with code 1"),
    LostRecord(node=1, why="no heartbeat for 15s", by=0),
    records.BackRecord(node=1),
    records.AtWorkRecord(node=1, at_work=False),
    records.SilentRecord(node=1, silent=True),
    records.ByeRecord(node=1),
    records.LimitsRecord(
        node=1,
        window=Window(process_group=timedelta(minutes=2), soft=timedelta(seconds=0.5), hard=None),
        reason="slow",
        by="me",
    ),
    records.StopRecord(node=1, signal=15, reason="SIGTERM", grace_s=9.5),
    records.StopWayRecord(node=1, way=StopWay.RESERVE, at=0),
    records.StopPointRecord(node=0, number=1, way=StopWay.UPDATES, point=7),
    StopVoteRecord(node=1, number=1, at=6),
    records.StopGoRecord(node=0, number=1),
    records.PacesRecord(
        node=1,
        paces=[
            RankPace(rank=9, iteration=1, waited=0.25, error=0.01, unit="update", at=5.5, fresh=10),
            RankPace(rank=8, iteration=1, waited=0.0, error=0.0, peers=(8, 10)),
        ],
    ),
    records.ViewRecord(
        node=1,
        view=NodeView(
            ranks=8,
            findings=(
                HangFinding(
                    rank=9,
                    state="stuck",
                    stale=(Kind.STEP, Kind.CPU),
                    window=timedelta(minutes=10),
                    reason="step counter and CPU time stale for more than 10m",
                    in_collective=True,
                    collectives=7,
                ),
            ),
        ),
    ),
    records.EndedRecord(node=1, end=NodeEnd(name="n1", failed=True)),
    records.DecisionRecord(
        node=0, decision=AttemptDecision(outcome="failed", exit_code=1, reason="a worker failed")
    ),
    UnknownRecord(),
]


@pytest.mark.parametrize("record", RECORDS, ids=records.name_of)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    read = records.decode(records.encode(record).encode())
    assert type(read) is type(record)
    assert records.encode(read) == records.encode(record)
    assert json.loads(records.encode(record))["kind"] == records.name_of(record)


def test_each_kind_has_an_example_here_and_a_name_of_its_own() -> None:
    kinds = typing.get_args(Record)
    assert {type(record) for record in RECORDS} == set(kinds)
    assert len({records.name_of(record) for record in RECORDS}) == len(kinds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "[" * 100_000,
        '{"kind": "lost"',
        '{"kind": "promoted", "node": 1}',
        '{"node": 1}',
        '{"kind": "lost", "node": 1}',
        '{"kind": "lost", "node": "1", "why": "silent"}',
        '{"kind": "stop-way", "node": 1, "way": "leap", "at": 1}',
        '{"kind": "decision", "node": 1, "decision": {"outcome": "postponed"}}',
        '{"kind": "limits", "node": 1, "window": {"soft": "soon"}, "reason": "", "by": ""}',
    ],
)
def test_what_this_version_cannot_read_changes_nothing(text: str) -> None:
    record = records.decode(text)
    assert record == UnknownRecord()
    state = RoundState(2)
    assert not state.take(record)
    assert state == RoundState(2)


def test_fields_of_another_version_are_passed_over() -> None:
    text = '{"kind": "lost", "node": 1, "why": "silent", "by": 0, "since": {"a": [1]}}'
    assert records.decode(text) == LostRecord(node=1, why="silent", by=0)


@given(st.binary(max_size=60), st.integers(0, 70))
def test_no_damage_is_a_reason_to_fail(noise: bytes, at: int) -> None:
    data = b'{"kind":"stop-vote","node":1,"number":2,"at":3}'
    records.decode(data[:at] + noise + data[at:])
    records.decode(data[:at])


@given(st.integers(), st.text(st.characters(codec="utf-8")), st.lists(st.text(max_size=3)))
def test_any_text_of_a_worker_is_carried_over(rank: int, how: str, lines: list[str]) -> None:
    node = rank % 64
    lines = [line.encode(errors="replace").decode() for line in lines]
    record = records.FailedRecord(node=node, rank=node, how=how, lines=lines)
    assert records.decode(records.encode(record)) == record


FACTS = NodeFacts(
    name="n0 a",
    address="10.0.0.1",
    attempt=2,
    hosts=True,
    history=[PAST],
    print=Fingerprint(host="n0", variables={"A": ""}, facts={"torch": None}, per_host=("B",)),
    clock_offset_s=-0.25,
)


@pytest.mark.parametrize(
    "value",
    [
        JobClaim(name="n 0", pid=7, at=1732.25, run_dir="r", nnodes="2:3", script="a.py"),
        RankClaim(name="n 0", pid=7, at=1732.25),
        FACTS,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_in_the_store_is_read_as_it_was_written(
    value: JobClaim | RankClaim | NodeFacts,
) -> None:
    kind: Any = type(value)
    assert store_values.decode(store_values.encode(value).encode(), kind) == value


@pytest.mark.parametrize("kind", [JobClaim, RankClaim, NodeFacts])
@pytest.mark.parametrize("data", [b"", b"2 n0", b"n0 71 1732.25", b"{}", b"[1]", b'{"name": 3}'])
def test_a_value_of_another_version_is_none(data: bytes, kind: Any) -> None:
    assert store_values.decode(data, kind) is None
