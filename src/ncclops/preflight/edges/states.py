"""What became of each edge, from what all hosts saw in both rounds; pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ncclops.preflight.edges import schedule
from ncclops.preflight.edges.explain import Edge
from ncclops.preflight.edges.interface import is_loopback
from ncclops.preflight.edges.model import Facts, Outcome, Seen

_LARGE = ("large-out", "large-in")


@dataclass
class States:
    """Edges by what is wrong with them; those in none of the sets work.

    ``unknown``: not tried, or failed once and not tried again while others recovered. ``large``:
    data from the first to the second is lost. ``unknown_large``: not looked at. ``flaky``: failed
    once, then passed. ``seen`` is what was seen last.
    """

    dead: set[Edge] = field(default_factory=set)
    ports: set[Edge] = field(default_factory=set)
    store_port: set[Edge] = field(default_factory=set)
    large: set[Edge] = field(default_factory=set)
    unknown: set[Edge] = field(default_factory=set)
    unknown_large: set[Edge] = field(default_factory=set)
    flaky: set[Edge] = field(default_factory=set)
    rtt_ms: dict[Edge, float] = field(default_factory=dict)
    seen: dict[Edge, Seen] = field(default_factory=dict)
    tested: dict[Edge, frozenset[int]] = field(default_factory=dict)


def settle(
    hosts: tuple[Facts, ...],
    live: set[int],
    first: Mapping[int, Outcome],
    second: Mapping[int, Outcome],
) -> States:
    """The state of every edge between ``live`` hosts."""
    states = States()
    again = {(src, each.dst): each for src, one in second.items() for each in one.seen}
    recovered: Counter[int] = Counter()
    for src, outcome in first.items():
        for seen in outcome.seen:
            once_more = again.get((src, seen.dst))
            if once_more is not None and seen.failed and not once_more.failed:
                recovered.update((src, seen.dst))
    for src in live:
        if src not in first:
            missed = schedule.edges_between((src,), live)
            states.unknown |= missed
            states.unknown_large |= missed | schedule.edges_between(live, (src,))
            continue
        outcome = first[src]
        for dst in outcome.skipped:
            states.unknown.add((src, dst))
            states.unknown_large.add((src, dst))
        for seen in outcome.seen:
            edge = (src, seen.dst)
            last = _both(seen, again.get(edge))
            if seen.failed and edge not in again and (recovered[src] or recovered[seen.dst]):
                states.unknown.add(edge)
                states.unknown_large.add(edge)
                continue
            if seen.failed and not last.failed:
                states.flaky.add(edge)
            _place(states, edge, last)
    owners: dict[str, set[int]] = defaultdict(set)
    for host in live:
        for each in hosts[host].addresses:
            owners[each.address].add(host)
    for dst in live:
        place = hosts[dst].place
        if place is not None:
            # Not probed: it would lead a host to itself.
            itself = live if is_loopback(place.address) else owners[place.address]
            states.dead |= schedule.edges_between(itself, (dst,))
    return states


def _both(seen: Seen, again: Seen | None) -> Seen:
    """What the second look says, and which ports passed at the first."""
    if again is None:
        return seen
    passed = {*again.passed, *seen.passed} - again.failed.keys()
    return msgspec.structs.replace(again, passed=tuple(sorted(passed)))


def _place(states: States, edge: Edge, seen: Seen) -> None:
    states.seen[edge] = seen
    large = {how for how in seen.failed.values() if how in _LARGE}
    blocked = {slot for slot, how in seen.failed.items() if how not in _LARGE}
    states.tested[edge] = frozenset({*seen.failed, *seen.passed})
    if blocked and not seen.passed and not large:
        states.dead.add(edge)
        states.unknown_large.add(edge)
        return
    if blocked == {0}:
        states.store_port.add(edge)
    elif blocked:
        states.ports.add(edge)
    if seen.rtt_ms >= 0:
        states.rtt_ms[edge] = seen.rtt_ms
    if "large-out" in large:
        states.large.add(edge)
    if "large-in" in large:
        states.large.add((edge[1], edge[0]))
