"""A stop at one step for all nodes, as one node's agent sees it in the shared log."""

from __future__ import annotations

from typing import Any

import pytest

from ncclops.agent.stop_agreement import SIGNAL
from ncclops.cluster.round_state import RoundState
from ncclops.cluster.shared_stop import SharedStop

ASKED = {"kind": "stop", "node": 1}
BY_STEPS = {"kind": "stop-point", "node": 0, "round": 1, "way": "steps", "point": 7}
BY_SIGNALS = {**BY_STEPS, "way": SIGNAL}
FAILED = {"kind": "failed", "node": 1}
GO = {"kind": "stop-go", "node": 0, "round": 1}


def agent(*records: dict[str, Any], cut_off: bool = False) -> SharedStop:
    state = RoundState(size=2)
    for record in records:
        state.take(record)
    return SharedStop(state, lambda *_, **__: None, lambda: cut_off)


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
        ([ASKED, BY_STEPS, {**BY_STEPS, "round": 2}, GO], False, True, False, False),
    ],
)
def test_how_the_ranks_of_this_node_are_to_end(
    records: list[dict[str, Any]], cut_off: bool, asked: bool, by_signals: bool, agreed: bool
) -> None:
    seen = agent(*records, cut_off=cut_off)
    assert (seen.asked, seen.by_signals, seen.agreed) == (asked, by_signals, agreed)


def test_the_point_is_the_latest_that_was_proposed() -> None:
    assert agent(ASKED).point is None
    later = {**BY_STEPS, "round": 2, "point": 9}
    assert agent(ASKED, BY_STEPS, later).point == later
    assert agent(ASKED, later, BY_STEPS).point == later, "two have decided, one after the other"


def test_offers_and_votes_go_to_the_log() -> None:
    posted: list[tuple[str, dict[str, Any]]] = []
    stop = SharedStop(
        RoundState(size=2), lambda kind, **fields: posted.append((kind, fields)), lambda: False
    )
    stop.offer("steps", 5)
    stop.vote(1, 6)
    assert posted == [("stop-way", {"way": "steps", "at": 5}), ("stop-vote", {"round": 1, "at": 6})]
