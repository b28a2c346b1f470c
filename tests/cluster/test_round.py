"""What a node knows of one round, of the job's store, and what its rendezvous process reports."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from ncclops.agent.stop_agreement import StopWay
from ncclops.cluster import messages
from ncclops.cluster.fingerprint import Fingerprint
from ncclops.cluster.job_store import JobStore
from ncclops.cluster.messages import Message
from ncclops.cluster.records import (
    LostRecord,
    Record,
    RefusedRecord,
    StopGoRecord,
    StopPointRecord,
    StopRecord,
    WaitingRecord,
)
from ncclops.cluster.round import Round
from ncclops.cluster.store_values import NodeFacts

FACTS = NodeFacts(
    name="n0",
    address="10.0.0.1",
    attempt=0,
    hosts=True,
    history=[],
    print=Fingerprint(host="n0", variables={"A": "1"}, facts={"torch": None}),
    clock_offset_s=0.1,
)
ASKED = StopRecord(node=1, reason="drain", grace_s=9.0)
POINT = StopPointRecord(number=0, way=StopWay.STEPS, point=7)


@pytest.mark.parametrize(
    "message",
    [
        messages.Tick(),
        messages.Connected(),
        messages.Waiting(["n0", "n1"], begun=True, first="n0: process 7"),
        messages.Met(1, 4),
        messages.Gathered([FACTS]),
        messages.Logged(ASKED),
        messages.NoRound("nodes 1, 2 did not come"),
        messages.Unneeded(),
        messages.StoreLost("Broken pipe"),
        messages.ProcessEnded(),
    ],
)
def test_a_message_is_one_line_there_and_back(message: Message) -> None:
    line = messages.encode(message)
    assert line.count(b"\n") == 1
    assert messages.decode(line) == message


@pytest.mark.parametrize("line", [b"{}", b'{"is": "unheard-of"}', b'{"is": "met", "rank": "one"}'])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode(line)


@pytest.mark.parametrize(
    "command", [messages.Meet(3, FACTS), messages.Post(ASKED), messages.Leave(over=True)]
)
def test_a_command_is_one_line_there_and_back(command: messages.Command) -> None:
    line = messages.encode(command)
    assert line.count(b"\n") == 1
    assert messages.decode_command(line) == command


@pytest.mark.parametrize(
    "line", [b"{}", b'{"do": "dance"}', b'{"do": "leave"}', b'{"is": "tick"}', b"leave"]
)
def test_what_is_no_command_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode_command(line)


class TestRound:
    def test_a_new_round_starts_without_the_state_of_the_last(self) -> None:
        last, following = Round(0, 4), Round(1, 4)
        last.meet(2, 3)
        last.state.take(ASKED)
        last.no_round = "late"
        assert following.rank is None
        assert (following.state.size, following.state.stop) == (4, None)
        assert not following.is_over_before_start

    @pytest.mark.parametrize(
        "record",
        [
            RefusedRecord(node=0, names=[], lines=[]),
            LostRecord(node=1, why="silent"),
            ASKED,
        ],
    )
    def test_what_ends_a_round_before_its_start(self, record: Record) -> None:
        current = Round(0, 2)
        current.meet(0, 2)
        current.state.take(WaitingRecord(missing=[1], here=["n0"]))
        assert not current.is_over_before_start
        current.state.take(record)
        assert current.is_over_before_start

    def test_the_first_that_is_left_decides(self) -> None:
        current = Round(0, 2)
        assert not current.is_ours_to_decide, "the nodes have not met"
        current.meet(1, 2)
        assert not current.is_ours_to_decide
        current.state.take(LostRecord(node=0, why="silent"))
        assert current.is_ours_to_decide

    def test_only_the_first_failure_comes_with_its_lines(self) -> None:
        current = Round(0, 2)
        assert [current.is_first_failure() for _ in range(3)] == [True, False, False]

    def test_a_record_that_is_on_its_way_is_not_posted_again(self) -> None:
        current = Round(0, 2)
        assert current.is_new_stop(POINT)
        assert not current.is_new_stop(POINT)
        later = StopPointRecord(number=1, way=StopWay.STEPS, point=9)
        assert current.is_new_stop(later)
        assert current.is_new_stop(StopGoRecord(number=1))


def test_a_store_is_lost_once_and_for_the_first_reason() -> None:
    reasons: list[str] = []
    job_store = JobStore("n0:29500", reasons.append)
    job_store.answered()
    job_store.lose("Broken pipe")
    job_store.lose("no answer for 30s")
    assert reasons == ["Broken pipe"]
    assert job_store.lost == "the job's store at n0:29500 is lost (Broken pipe)"
    assert (job_store.is_ours, job_store.pids) == (False, set())


def test_a_store_that_a_node_finds_gone_after_it_was_stopped_is_told_with_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have taken the node for lost by then, and may have finished the job."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job_store = JobStore("n0:29500", lambda _: None)

    async def watch_and_lose() -> None:
        nonlocal now
        job_store.watch(8.0)
        now += 21
        job_store.lose("Broken pipe")

    loop = asyncio.new_event_loop()  # whose own clock is real
    monkeypatch.setattr(loop, "time", lambda: 0.0)
    loop.run_until_complete(watch_and_lose())
    loop.close()
    assert job_store.lost == (
        "the job's store at n0:29500 is lost (Broken pipe, once this node had stood still for 21s:"
        " the others wait 8s for one)"
    )
