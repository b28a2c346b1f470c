"""A stop at one step for all nodes, as one node's agent sees it in the shared log."""

from __future__ import annotations

import pytest

from ncclops.agent.stop_agreement import ProposedStop, StopWay
from ncclops.cluster.records import (
    FailedRecord,
    Record,
    StopGoRecord,
    StopPointRecord,
    StopRecord,
    StopVoteRecord,
    StopWayRecord,
)
from ncclops.cluster.round_state import RoundState
from ncclops.cluster.shared_stop import SharedStop

ASKED = StopRecord(node=1, reason="drain", grace_s=9.0)
BY_STEPS = StopPointRecord(node=0, number=1, way=StopWay.STEPS, point=7)
BY_SIGNALS = StopPointRecord(node=0, number=1, way=StopWay.SIGNAL, point=7)
LATER = StopPointRecord(node=0, number=2, way=StopWay.STEPS, point=9)
FAILED = FailedRecord(node=1, rank=2, how="exited with code 1")
GO = StopGoRecord(node=0, number=1)


def agent(*records: Record, cut_off: bool = False) -> SharedStop:
    state = RoundState(size=2)
    for record in records:
        state.take(record)
    return SharedStop(state, lambda _: None, lambda: cut_off)


@pytest.mark.parametrize(
    ("records", "cut_off", "asked", "by_signals", "agreed"),
    [
        ([], False, False, False, False),
        ([ASKED], False, True, False, False),
        ([ASKED, BY_STEPS], False, True, False, False),
        ([ASKED, BY_STEPS, GO], False, True, False, True),
        ([ASKED, BY_SIGNALS], False, True, True, False),
        # Nobody can be asked for a step any more.
        ([ASKED], True, True, True, False),
        ([ASKED, FAILED], False, True, True, False),
        # A point that was given up is not agreed on by an answer that was under way.
        ([ASKED, BY_STEPS, LATER, GO], False, True, False, False),
    ],
)
def test_how_the_ranks_of_this_node_are_to_end(
    records: list[Record], cut_off: bool, asked: bool, by_signals: bool, agreed: bool
) -> None:
    seen = agent(*records, cut_off=cut_off)
    assert (seen.asked, seen.by_signals, seen.agreed) == (asked, by_signals, agreed)


def test_the_point_is_the_latest_that_was_proposed() -> None:
    latest = ProposedStop(2, StopWay.STEPS, 9)
    assert agent(ASKED).proposal is None
    assert agent(ASKED, BY_STEPS, LATER).proposal == latest
    assert agent(ASKED, LATER, BY_STEPS).proposal == latest, "two have decided"


def test_offers_and_votes_go_to_the_log() -> None:
    posted: list[Record] = []
    stop = SharedStop(RoundState(size=2), posted.append, lambda: False)
    stop.offer(StopWay.STEPS, 5)
    stop.vote(1, 6)
    assert posted == [StopWayRecord(way=StopWay.STEPS, at=5), StopVoteRecord(number=1, at=6)]
