"""Agents of several nodes agree on one step to end at, whichever of them is lost meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.agent.stop_agreement import StopWay
from ncclops.classify.policy import default_rules
from ncclops.cluster.records import (
    EndedRecord,
    LostRecord,
    Record,
    StopGoRecord,
    StopPointRecord,
    StopRecord,
    StopVoteRecord,
    StopWayRecord,
)
from ncclops.cluster.round_state import RoundState
from ncclops.cluster.stop_vote import next_record
from ncclops.decision.deciding import decide
from ncclops.decision.node_end import JobRules, NodeEnd
from ncclops.decision.retrying import RetryPlan

ASKED = StopRecord(node=0, reason="drain", grace_s=9.0)


def after(size: int, *records: Record) -> RoundState:
    round_state = RoundState(size)
    for record in (ASKED, *records):
        round_state.take(record)
    return round_state


def way(node: int, at: int, how: StopWay = StopWay.STEPS) -> Record:
    return StopWayRecord(node=node, way=how, at=at)


def point(at: int, number: int = 0) -> Record:
    return StopPointRecord(node=0, number=number, way=StopWay.STEPS, point=at)


def vote(node: int, at: int, number: int = 0) -> Record:
    return StopVoteRecord(node=node, number=number, at=at)


def test_no_proposal_is_made_before_all_have_reported_how_far_they_are() -> None:
    assert next_record(RoundState(2)) is None  # no stop was requested
    assert next_record(after(2, way(0, 5))) is None
    said = next_record(after(2, way(0, 5), way(1, 7)))
    assert said == StopPointRecord(number=0, way=StopWay.STEPS, point=9)


def test_it_holds_once_none_has_passed_it() -> None:
    ways = (way(0, 5), way(1, 7))
    assert next_record(after(2, *ways, point(9))) is None
    assert next_record(after(2, *ways, point(9), vote(0, 8))) is None
    go = next_record(after(2, *ways, point(9), vote(0, 8), vote(1, 8)))
    assert go == StopGoRecord(number=0)
    assert go is not None
    done = after(2, *ways, point(9), vote(0, 8), vote(1, 8), go)
    assert done.stop_go
    assert next_record(done) is None


def test_who_was_faster_gets_a_later_one() -> None:
    raced = after(2, way(0, 5), way(1, 7), point(9), vote(0, 9), vote(1, 8))
    again = next_record(raced)
    assert again == StopPointRecord(number=1, way=StopWay.STEPS, point=13)
    raced.take(again)
    assert next_record(raced) is None  # the votes were on another point
    raced.take(vote(1, 12, number=0))
    assert raced.stop_votes == {}


def test_nodes_that_cannot_stop_alike_are_stopped_by_signals() -> None:
    for other in (StopWay.UPDATES, StopWay.SIGNAL):
        said = next_record(after(2, way(0, 5), way(1, 7, other)))
        assert isinstance(said, StopPointRecord)
        assert said.way is StopWay.SIGNAL


def test_who_waits_in_reserve_is_not_asked_for_a_step() -> None:
    ways = (way(0, 5), way(1, 0, StopWay.RESERVE))
    assert next_record(after(2, way(0, 5))) is None
    said = next_record(after(2, *ways))
    assert said == StopPointRecord(number=0, way=StopWay.STEPS, point=7)
    go = next_record(after(2, *ways, point(7), vote(0, 6)))
    assert go == StopGoRecord(number=0)


def test_lost_ended_and_reserve_nodes_have_no_vote() -> None:
    round_state = after(
        4, way(0, 5), EndedRecord(node=1, end=NodeEnd(name="n1")), LostRecord(node=2, why="silent")
    )
    round_state.idle = frozenset({3})
    assert next_record(round_state) is not None


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(0, 3))
def test_all_end_at_one_step_that_none_has_passed(chance: Any, nodes: int, losses: int) -> None:
    """Nodes that step at their own pace, hold where they are asked to, and get lost."""
    round_state = after(nodes)
    steps = [chance.randrange(100)] * nodes
    holds: list[int | None] = [None] * nodes
    offered, voted = set[int](), [-1] * nodes
    for _ in range(2000):
        if round_state.stop_go:
            break
        for node in chance.choices(round_state.living, k=5):
            hold = holds[node]
            # Collectives keep all within a step of each other.
            abreast = steps[node] <= min(steps[n] for n in round_state.living)
            if abreast and (hold is None or steps[node] < hold):
                steps[node] += 1
        node = chance.choice(round_state.living)
        proposal = round_state.stop_point
        if node not in offered:
            offered.add(node)
            round_state.take(way(node, steps[node]))
        elif proposal is not None and voted[node] != proposal.number:
            voted[node] = proposal.number
            holds[node] = proposal.point
            round_state.take(vote(node, steps[node], proposal.number))
        if losses and len(round_state.living) > 1 and chance.random() < 0.05:
            losses -= 1
            round_state.take(LostRecord(node=chance.choice(round_state.living), why="silent"))
        if record := next_record(round_state):
            round_state.take(record)
    assert round_state.stop_go
    assert round_state.stop_point is not None
    assert all(steps[node] <= round_state.stop_point.point for node in round_state.living)
    assert all(holds[node] == round_state.stop_point.point for node in round_state.living)


def test_no_attempt_follows_a_failure_where_a_node_was_asked_to_stop_after_its_end() -> None:
    round_state = RoundState(2)
    for node in range(2):
        round_state.take(EndedRecord(node=node, end=NodeEnd(name=f"n{node}", failed=True)))
    round_state.take(ASKED)
    assert [end.stopping for end in round_state.node_ends()] == [True, False]


ENDED_BY_IT = EndedRecord(node=1, end=NodeEnd(name="n1", stopped_elsewhere=True))
ENDED_BEFORE = EndedRecord(node=0, end=NodeEnd(name="n0"))
LOST = LostRecord(node=0, why="its agent was killed")
RULES = JobRules(
    retry=RetryPlan(lane="generic", rules=default_rules(), granted=1),
    losses_allowed=True,
    replaceable=True,
)


@pytest.mark.parametrize(
    ("records", "is_stopped"),
    [
        # The ranks of node 0 had ended when it was asked, and it has ended those of node 1.
        ([ENDED_BEFORE, ASKED, ENDED_BY_IT], True),
        # It was killed before it could say how its part ended.
        ([ASKED, ENDED_BY_IT, LOST], True),
        # All had ended by themselves.
        ([ENDED_BEFORE, EndedRecord(node=1, end=NodeEnd(name="n1")), ASKED], False),
    ],
)
def test_a_stop_that_has_ended_others_is_the_end_of_the_job_whatever_became_of_who_was_asked(
    records: list[Record], is_stopped: bool
) -> None:
    round_state = RoundState(2)
    for record in records:
        round_state.take(record)
    ends = round_state.node_ends()
    assert [end.stop for end in ends] == [ASKED.request if is_stopped else None, None]
    decision = decide(ends, RULES, random=lambda: 0.5)
    assert decision.outcome == ("stopped" if is_stopped else "completed")
    assert decision.following is None
