"""Which edges fail only because a rule for ports drops answers as well; pure.

A firewall that keeps no state looks at each packet: its rule for the ports on which a host is
connected to also drops what answers to connections that the host opens from such a port. Those fail
at ports that seem to be chance, and are no cause of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ncclops.preflight.edges.explain import Edge
from ncclops.preflight.edges.model import Facts, Seen
from ncclops.preflight.edges.states import States, scattered

# A range that holds so small a part of all ports holds none of several by chance.
_NARROW = 0.2


@dataclass(frozen=True)
class _Blocked:
    """Ports that failed, from ``low`` to ``high``, and the nearest beyond that passed."""

    low: int
    high: int
    below: int
    above: int

    def may_hold(self, port: int) -> bool:
        return self.below < port < self.above

    def holds(self, port: int) -> bool:
        return self.low <= port <= self.high


def answers(hosts: Sequence[Facts], states: States) -> dict[Edge, Edge]:
    """The edges whose failures are those of the opposite edge, which they lead to."""
    found: dict[Edge, Edge] = {}
    edges = {*states.ports, *states.dead}
    out, into = Counter(src for src, _ in edges), Counter(dst for _, dst in edges)
    # The rule is where most fails, and rather for what comes to a host: the others are its answers.
    for edge in sorted(edges, key=lambda e: (max(out[e[0]], into[e[1]]), into[e[1]], e)):
        seen, low_high = states.seen.get(edge), hosts[edge[0]].port_range
        if seen is None:
            continue
        own = _range(hosts, edge, seen)
        for other in _opposite(edge, states):
            back = states.seen.get(other)
            if back is None or other in found:
                continue
            if seen.by_source and other not in states.unsure:
                found[edge] = other  # a rule for local ports, however many ranges it has
                break
            blocked = _range(hosts, other, back)
            if blocked is None or not _by_source(seen, blocked):
                continue
            narrow = blocked.above - blocked.below <= _NARROW * max(1, low_high[1] - low_high[0])
            if own is None or edge in states.dead or narrow:
                found[edge] = other
                break
    return found


def _opposite(edge: Edge, states: States) -> list[Edge]:
    """The edges whose rule may be the one: the opposite one. If that was not looked at, those from
    the same host, or to it."""
    other = (edge[1], edge[0])
    if other in states.ports:
        return [other]
    if other not in states.unknown and other not in states.unsure:
        return []
    return sorted(each for each in states.ports if each[0] == other[0] or each[1] == other[1])


def _range(hosts: Sequence[Facts], edge: Edge, seen: Seen) -> _Blocked | None:
    """The range of ``edge``'s ports that fails; None where none does, or ports between pass."""
    ports = hosts[edge[1]].ports
    failed = sorted(ports[slot] for slot in seen.failed)
    passed = [ports[slot] for slot in seen.passed]
    if not failed or not passed or scattered(failed, passed):
        return None
    below = max((port for port in passed if port < failed[0]), default=0)
    above = min((port for port in passed if port > failed[-1]), default=1 << 16)
    return _Blocked(failed[0], failed[-1], below, above)


def _by_source(seen: Seen, blocked: _Blocked) -> bool:
    """Whether what failed was opened from ports that are blocked, and what passed was not."""
    failed = [seen.sources.get(slot, 0) for slot in seen.failed]
    passed = [seen.sources[slot] for slot in seen.passed if slot in seen.sources]
    return all(map(blocked.may_hold, failed)) and not any(map(blocked.holds, passed))
