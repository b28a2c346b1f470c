"""How agents agree on one step after which the ranks of all nodes end. Pure.

    every agent    "stop-way"    how its ranks can be stopped, and how far they are
    the decider    "stop-point"  a step beyond them all, where ranks hold from now on
    every agent    "stop-vote"   how far its ranks were, once it had proposed that to them
    the decider    "stop-go"     none had passed it: all end there; else the next "stop-point"

All through the shared log, so the decider may be lost on the way and the next one goes on from
where the log ends. See ``record.stop_point`` for what an agent and its ranks do with a point.
"""

from __future__ import annotations

from ncclops.agent.stop_agreement import StopWay
from ncclops.cluster.records import StopGoRecord, StopPointRecord
from ncclops.cluster.round_state import RoundState

# Steps that the first proposal is ahead. A record takes a few milliseconds to all nodes; where
# steps are shorter, the next proposal is further ahead, and ranks hold at a point that was missed.
_MARGIN = 2


def next_record(round_state: RoundState) -> StopPointRecord | StopGoRecord | None:
    """The decider's next record; None while it waits for a node."""
    asked = [
        r for r in round_state.living if r not in round_state.idle and r not in round_state.ended
    ]
    point = round_state.stop_point
    if round_state.stop is None or round_state.stop_go or not asked:
        return None
    offers = {rank: offer for rank, offer in round_state.stop_ways.items() if rank in asked}
    voters = [
        rank for rank in asked if rank not in offers or offers[rank].way is not StopWay.RESERVE
    ]
    if point is None:
        if len(offers) < len(asked):
            return None
        common = {offers[rank].way for rank in voters}
        if len(common) != 1:
            return _point(0, StopWay.SIGNAL, 0)
        return _point(0, common.pop(), max(offers[rank].at for rank in voters))
    if point.way is StopWay.SIGNAL or not all(rank in round_state.stop_votes for rank in voters):
        return None
    at = max(round_state.stop_votes[rank] for rank in voters)
    if at < point.point:
        return StopGoRecord(number=point.number)
    return _point(point.number + 1, point.way, at)


def _point(number: int, way: StopWay, at: int) -> StopPointRecord:
    return StopPointRecord(number=number, way=way, point=at + (_MARGIN << number))
