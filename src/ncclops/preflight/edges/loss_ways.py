"""Which way packets are lost, between the ends of a cause: out, back, both, or unknown; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ncclops.preflight.edges import schedule, states
from ncclops.preflight.edges.explain import Claim, Way
from ncclops.preflight.edges.model import Shape
from ncclops.preflight.edges.states import States

# Packets are lost one way where that is so many times as likely as the other way. An edge that
# reports nothing has sent so many packets with data, and opened so many connections, at least.
_ONE_WAY, _QUIET_SENT, _QUIET_TRIED = 4.0, 45, 3


def directed(claim: Claim, found: States, live: Sequence[int]) -> Claim:
    """``claim`` of losses, by the way that packets are lost. Whoever opens connections shows
    both: of what is lost on the way back, the answers to what opens them."""
    if claim.shape in ("everything", "several") or {*claim.a} & {*claim.b}:
        return claim
    way = _way_lost(claim, found, live)
    if claim.shape.startswith("host"):
        shapes: dict[str, Shape] = {"out": "host-out", "in": "host-in"}
        return replace(claim, shape=shapes.get(way, "host"), way=way)
    if way == "unknown":
        return replace(claim, way=way)
    ends = (claim.b, claim.a) if way == "in" else (claim.a, claim.b)
    one_way = way in ("out", "in")
    single: Shape = "edge" if one_way else "pair"
    shape = claim.shape if claim.shape == "group" else single
    return replace(claim, shape=shape, a=ends[0], b=ends[1], both_ways=not one_way, way=way)


def _way_lost(claim: Claim, found: States, live: Sequence[int]) -> Way:
    """By the packets with data that were sent again; where none were, by what opens connections
    if that is lost one way only."""
    a = {*claim.a}
    b = {*(claim.b or live)} - a
    data, opening = list[float](), list[tuple[int, int]]()
    for edges in (schedule.edges_between(a, b), schedule.edges_between(b, a)):
        looked = edges - found.unknown - found.dead
        details = [found.seen[edge] for edge in looked & found.seen.keys()]
        quiet = looked - found.seen.keys()  # of these next to nothing was lost
        again = sum(each.resent - each.opening for each in details)
        sent = sum(each.sent for each in details) + _QUIET_SENT * len(quiet)
        data.append(again / max(1, sent))
        tried = sum(len(each.passed) + len(each.failed) for each in details)
        tried += _QUIET_TRIED * len(quiet)
        opening.append((sum(each.opening + states.losses(each) for each in details), tried))
    out, back = data
    if max(data) >= states.RESENT_SHARE:
        return "out" if out > _ONE_WAY * back else "in" if back > _ONE_WAY * out else "both"
    (lost, tried), (lost_back, tried_back) = opening
    if not lost_back and _is_no_chance(lost, tried, tried_back):
        return "out"
    if not lost and _is_no_chance(lost_back, tried_back, tried):
        return "in"
    return "unknown"


def _is_no_chance(lost: int, tried: int, others: int) -> bool:
    """Whether chance would not spare all of ``others`` where so many of ``tried`` are lost."""
    return (1 - min(1.0, lost / max(1, tried))) ** others < states.CHANCE
