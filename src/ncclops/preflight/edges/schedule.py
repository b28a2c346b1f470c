"""Who connects to whom, on which ports, and which edges are tried a second time; pure.

Host i goes through i+1, i+2, … modulo n, a few at a time and without waiting for the others: each
host is then connected to by about as many as it connects to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ncclops.preflight.edges.model import Outcome

# Ports that each host listens on, beside the store's: with all of them tried, a blocked range of a
# thirtieth of the kernel's 28,232 is seen.
PORTS = 32
# Connections of a host in the first round, as many as there is time for in seconds: a probe process
# opens 1,500 a second (docs/benchmarks.md). At least three to each host, on different ports.
_CONNECTIONS, _LEAST_PORTS = 1500, 3
# In how large a job each edge tries the store's port, and then one edge in how many.
_STORE_PORT_UP_TO, _STORE_PORT_EVERY = 128, 16
# The second round of a host: so many edges between one suspect and good hosts, and so many in all.
_PER_SUSPECT, _PER_HOST = 4, 24
# In so small a job all that failed is tried again: side by side it takes no longer.
_ALL_UP_TO = 9
# A host is suspect when more than this part of the edges to or from it failed.
_SUSPECT = 0.5


def peers(n: int, host: int) -> list[int]:
    """The hosts that ``host`` connects to, in order."""
    return [(host + step) % n for step in range(1, n)]


def slots(n: int, src: int, dst: int, count: int) -> list[int]:
    """The slots of ``dst``'s ports that ``src`` tries, the first one with all sizes.

    ``count`` is how many there are beside slot 0. Different edges try different ones.
    """
    if count <= 0:
        return [0]
    most = max(_LEAST_PORTS, min(count, _CONNECTIONS // max(1, n - 1)))
    most = min(most, count)
    first = src * 5 + dst * 11
    chosen = [1 + (first + count * each // most) % count for each in range(most)]
    if n <= _STORE_PORT_UP_TO or (src + dst) % _STORE_PORT_EVERY == 0:
        chosen.append(0)
    return chosen


def again(n: int, outcomes: Mapping[int, Outcome]) -> dict[int, tuple[int, ...]]:
    """The edges of the second round, by the host that tries them.

    All that failed, as long as they are few, but for those to hosts that have fallen silent and
    answer nobody; and, after them, those on which time ran out.
    In a larger job, of a host with which most edges failed, some with hosts that are good
    otherwise: these tell whether it is that host.
    """
    failed = [
        (src, seen.dst)
        for src, each in outcomes.items()
        for seen in each.seen
        if seen.dst in outcomes or seen.passed
    ]
    late = {(src, dst) for src, each in outcomes.items() for dst in each.skipped}
    touching = Counter(host for edge in failed if edge not in late for host in set(edge))
    suspects = {host for host, count in touching.items() if count > _SUSPECT * (n - 1)}
    per_host: Counter[int] = Counter()
    per_suspect: Counter[tuple[int, str]] = Counter()
    chosen: dict[int, list[int]] = {}
    # Of those as good, some of every host: each begins with another.
    failed.sort(
        key=lambda edge: (edge in late, *_goodness(edge, touching), (edge[1] - edge[0]) % n)
    )
    for src, dst in failed:
        marks = [(each, way) for each, way in ((src, "out"), (dst, "in")) if each in suspects]
        full = n > _ALL_UP_TO and marks and all(per_suspect[mark] >= _PER_SUSPECT for mark in marks)
        if full or per_host[src] >= _PER_HOST:
            continue
        per_host[src] += 1
        per_suspect.update(marks)
        chosen.setdefault(src, []).append(dst)
    return {src: tuple(dsts) for src, dsts in chosen.items()}


def _goodness(edge: tuple[int, int], touching: Mapping[int, int]) -> tuple[int, int]:
    """Edges with one good end come first."""
    counts = sorted(touching.get(each, 0) for each in edge)
    return counts[0], counts[1]


def edges_between(sources: Iterable[int], targets: Iterable[int]) -> set[tuple[int, int]]:
    """All edges from one set to the other."""
    ends = list(targets)
    return {(src, dst) for src in sources for dst in ends if src != dst}
