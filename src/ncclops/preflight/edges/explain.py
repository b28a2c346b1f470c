"""The smallest set of causes that explains all edges that failed; pure.

A cause claims a set of edges: all of a host, those into it, those between two groups. It is
considered only if none of the edges that it claims is known to work, and, unless it is one edge,
if at least two edges that nothing else explains speak for it. Of those the cheapest set that
covers all failures is wanted: found by taking, again and again, the cause that explains most for
its cost, and then dropping what the others explain as well.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ncclops.preflight.edges.model import Shape

Edge = tuple[int, int]
# Which way the packets of a claim are lost: from its ``a``, to it, or both.
Way = Literal["", "out", "in", "both", "unknown"]
# What naming a cause costs: a host is the usual thing to break; groups that a configuration makes
# (subnet, interface) are likelier than groups that only the failures make.
_HOST_COST, _NAMED_COST, _FOUND_COST, _EDGE_COST = 1.0, 1.4, 2.2, 1.0
# More edges than this without a common shape are one finding, not a list.
MOST_EDGES = 8
_MOST_GROUPS = 16
# Of so many edges of one host that fail, while others work, the list is said in one.
_STAR = 3


@dataclass(frozen=True)
class Claim:
    """A cause by its shape: edges from hosts ``a`` to hosts ``b``. ``by``: what names the groups.

    ``explained``: the failed edges that are its own. ``in_part``: others that it is about work.
    """

    shape: Shape
    a: tuple[int, ...]
    b: tuple[int, ...] = ()
    both_ways: bool = False
    by: str = ""
    in_part: bool = False
    way: Way = ""
    cost: float = _EDGE_COST
    explained: frozenset[Edge] = field(default=frozenset(), compare=False)


def explain(
    live: Sequence[int],
    failed: Iterable[Edge],
    unknown: Callable[[Edge], bool],
    groups: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> list[Claim]:
    """The claims that explain ``failed``, the largest first.

    ``live`` are the hosts whose edges count. An edge that is neither in ``failed`` nor ``unknown``
    works. ``groups`` are the hosts by what they have in common: by attribute, by its value.
    """
    hosts = sorted(live)
    present = set(hosts)
    wanted = {edge for edge in failed if edge[0] in present and edge[1] in present}
    if not wanted:
        return []
    chosen: list[tuple[Claim, set[Edge]]] = []
    left = set(wanted)
    candidates = _candidates(hosts, wanted, unknown, groups or {})
    while left:
        best = max(
            ((claim, edges & left, edges) for claim, edges in candidates),
            key=lambda each: _worth(*each),
            default=None,
        )
        if best is None or _worth(*best) <= _EDGE_COST:
            break
        chosen.append((best[0], best[2] & wanted))
        left -= best[1]
    chosen = _cheaper(chosen, candidates, wanted) + _pairs_and_edges(left)
    return _several(_without_superfluous(_merged(chosen, wanted, unknown), wanted))


def as_group(
    claim: Claim,
    unknown: Callable[[Edge], bool],
    groups: Mapping[str, Mapping[str, Sequence[int]]],
) -> Claim:
    """A host's ``claim`` as one between two groups, where nothing tells the two apart: all that
    fails lies between them, and what else does has not been looked at."""
    if not claim.shape.startswith("host"):
        return claim
    (host,) = claim.a
    others = {end for edge in claim.explained for end in edge} - {host}
    for by, named in groups.items():
        own = next(((value, each) for value, each in named.items() if host in each), None)
        if own is None or len(named) > _MOST_GROUPS:
            continue
        mates = [each for each in own[1] if each != host]
        for value, there in named.items():
            rest = itertools.chain(_between(mates, there), _between(there, mates))
            if (
                value == own[0]
                or not mates
                or not others <= {*there}
                or not all(map(unknown, rest))
            ):
                continue
            inward = all(edge[1] == host for edge in claim.explained)
            both_ways = not inward and not all(edge[0] == host for edge in claim.explained)
            a, b = (there, own[1]) if inward else (own[1], there)
            label = f"{by}: {value}, {own[0]}" if inward else f"{by}: {own[0]}, {value}"
            group = Claim("group", tuple(a), tuple(b), both_ways, by=label, cost=_NAMED_COST)
            return replace(group, explained=claim.explained)
    return claim


def _worth(claim: Claim, new: set[Edge], edges: set[Edge]) -> float:
    """How much a claim explains for its cost; one that overclaims is worth less."""
    if len(new) < 2 or not _witnessed(claim, new):
        return 0.0
    return len(new) / claim.cost - 0.001 * len(edges - new) / max(1, len(edges))


def _witnessed(claim: Claim, new: set[Edge]) -> bool:
    """Whether at least two others testify: one host's word on another is a word on the edge."""
    if claim.shape == "host":
        others = {each for edge in new for each in edge} - set(claim.a)
        return len(others) >= 2
    return True


def _candidates(
    hosts: list[int],
    failed: set[Edge],
    unknown: Callable[[Edge], bool],
    groups: Mapping[str, Mapping[str, Sequence[int]]],
) -> list[tuple[Claim, set[Edge]]]:
    if len(hosts) < 3:
        return []
    into: dict[int, set[int]] = defaultdict(set)
    out: dict[int, set[int]] = defaultdict(set)
    for src, dst in failed:
        out[src].add(dst)
        into[dst].add(src)

    def claimed(edges: Iterable[Edge]) -> set[Edge] | None:
        found = set()
        for edge in edges:
            if edge in failed:
                found.add(edge)
            elif not unknown(edge):
                return None
        return found

    made: list[tuple[Claim, set[Edge]]] = []

    def consider(claim: Claim, edges: Iterable[Edge]) -> bool:
        found = claimed(edges)
        if found is None or len(found) < 2:
            return False
        made.append((claim, found))
        return True

    everyone = tuple(hosts)
    if all(host in into and host in out for host in hosts):
        consider(Claim("everything", everyone, everyone, cost=_HOST_COST), _between(hosts, hosts))
    for host in {*into, *out}:
        one = (host,)
        inward = len(into[host]) >= 2 and consider(
            Claim("host-in", one, cost=_HOST_COST), ((src, host) for src in hosts if src != host)
        )
        outward = len(out[host]) >= 2 and consider(
            Claim("host-out", one, cost=_HOST_COST), ((host, dst) for dst in hosts if dst != host)
        )
        # One edge is enough beside all of the other way, where no other is known to work.
        if (inward and out[host]) or (outward and into[host]):
            edges = {*_between(one, hosts), *_between(hosts, one)}
            consider(Claim("host", one, cost=_HOST_COST), edges)
    for by, named in groups.items():
        if 1 < len(named) <= _MOST_GROUPS:
            members = {value: [h for h in each if h in set(hosts)] for value, each in named.items()}
            for a, first in members.items():
                for b, second in members.items():
                    if max(len(first), len(second)) > 1:
                        label = f"{by}: {a}, {b}"
                        _group(consider, label, first, second, _NAMED_COST)
                if len(first) > 1:
                    _group(consider, f"{by}: {a}", first, everyone, _NAMED_COST)
                    _group(consider, f"{by}: {a}", everyone, first, _NAMED_COST)
    for first, second in (*_found_groups(hosts, out), *_stars(into, out)):
        _group(consider, "", first, second, _FOUND_COST)
    return made


def _group(
    consider: Callable[[Claim, Iterable[Edge]], bool],
    by: str,
    first: Sequence[int],
    second: Sequence[int],
    cost: float,
) -> None:
    a, b = tuple(first), tuple(second)
    if len({*a, *b}) < 3:
        return  # that is a pair
    one = consider(Claim("group", a, b, by=by, cost=cost), _between(a, b))
    if one and a != b:
        edges = {*_between(a, b), *_between(b, a)}
        consider(Claim("group", a, b, both_ways=True, by=by, cost=cost), edges)


def _found_groups(
    hosts: list[int], out: Mapping[int, set[int]]
) -> Iterable[tuple[list[int], list[int]]]:
    """Hosts that fail towards the same hosts: what a VLAN or a switch would make of them."""
    classes: dict[frozenset[int], list[int]] = defaultdict(list)
    for host in hosts:
        if out.get(host):
            # A group whose own members do not reach each other either has itself among its targets.
            classes[frozenset(out[host] | {host})].append(host)
            classes[frozenset(out[host])].append(host)
    for targets, members in classes.items():
        others = sorted(targets - set(members)) or sorted(targets)
        if len(members) >= 2 and len(others) >= 2:
            yield members, others


def _stars(
    into: Mapping[int, set[int]], out: Mapping[int, set[int]]
) -> Iterable[tuple[list[int], list[int]]]:
    """A host and some of the others: one finding, of which nobody is convicted."""
    for host in sorted({*into, *out}):
        if len(into.get(host, ())) >= _STAR:
            yield sorted(into[host]), [host]
        if len(out.get(host, ())) >= _STAR:
            yield [host], sorted(out[host])


def _between(first: Iterable[int], second: Iterable[int]) -> Iterable[Edge]:
    ends = list(second)
    return ((src, dst) for src in first for dst in ends if src != dst)


def _cheaper(
    chosen: list[tuple[Claim, set[Edge]]],
    candidates: Iterable[tuple[Claim, set[Edge]]],
    wanted: set[Edge],
) -> list[tuple[Claim, set[Edge]]]:
    """``chosen``, with two groups that a configuration makes instead of the claims that are wholly
    between them, where that costs less: of its hosts one after the other has explained most."""
    made = list(chosen)
    for claim, edges in candidates:
        if claim.cost != _NAMED_COST or {*claim.a} & {*claim.b}:
            continue
        within = [each for each in made if each[1] <= edges]
        if sum(each.cost for each, _ in within) > claim.cost:
            made = [each for each in made if each not in within] + [(claim, edges & wanted)]
    return made


def _pairs_and_edges(left: set[Edge]) -> list[tuple[Claim, set[Edge]]]:
    made: list[tuple[Claim, set[Edge]]] = []
    for src, dst in sorted(left):
        if (dst, src) not in left:
            made.append((Claim("edge", (src,), (dst,)), {(src, dst)}))
        elif src < dst:
            made.append((Claim("pair", (src,), (dst,), both_ways=True), {(src, dst), (dst, src)}))
    return made


def _merged(
    chosen: list[tuple[Claim, set[Edge]]], failed: set[Edge], unknown: Callable[[Edge], bool]
) -> list[tuple[Claim, set[Edge]]]:
    """Groups that fail towards the same hosts are one group, if that costs less."""
    made = list(chosen)
    for one, two in itertools.combinations(
        [each for each, _ in chosen if each.shape == "group"], 2
    ):
        if not {one, two} <= {claim for claim, _ in made}:
            continue
        ends, both_ways = _united(one, two), one.both_ways or two.both_ways
        if ends is None:
            continue
        a, b = ends
        edges = {*_between(a, b)} | ({*_between(b, a)} if both_ways else set())
        if one.cost + two.cost > _FOUND_COST and all(e in failed or unknown(e) for e in edges):
            made = [each for each in made if each[0] not in (one, two)]
            made.append((Claim("group", a, b, both_ways, cost=_FOUND_COST), edges & failed))
    return made


def _united(one: Claim, two: Claim) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ends of two groups that share one end; what fails both ways may be turned around."""
    turned = (one.b, one.a)
    for a, b in ((one.a, one.b), turned) if one.both_ways else ((one.a, one.b),):
        for c, d in ((two.a, two.b), (two.b, two.a)) if two.both_ways else ((two.a, two.b),):
            if {*b} == {*d}:
                return tuple(sorted({*a, *c})), b
            if {*a} == {*c}:
                return a, tuple(sorted({*b, *d}))
    return None


def _without_superfluous(chosen: list[tuple[Claim, set[Edge]]], wanted: set[Edge]) -> list[Claim]:
    """Each claim with what it explains; none that the others explain as well."""
    kept = list(chosen)
    for each in sorted(chosen, key=lambda pair: len(pair[1])):
        others = [edges for claim, edges in kept if claim is not each[0]]
        if each[1] <= set().union(*others) and len(kept) > 1:
            kept = [pair for pair in kept if pair[0] is not each[0]]
    made, told = list[Claim](), set[Edge]()
    for claim, edges in sorted(kept, key=lambda pair: -len(pair[1])):
        own = frozenset(edges & wanted) - told
        told |= own
        made.append(replace(claim, explained=own))
    return made


def _several(claims: list[Claim]) -> list[Claim]:
    """Many single edges, without a common shape, as one."""
    single = [each for each in claims if each.shape in ("pair", "edge")]
    if len(single) <= MOST_EDGES:
        return claims
    edges = frozenset(edge for each in single for edge in each.explained)
    ends = tuple(sorted({src for src, _ in edges})), tuple(sorted({dst for _, dst in edges}))
    rest = [each for each in claims if each.shape not in ("pair", "edge")]
    return [*rest, Claim("several", *ends, explained=edges)]
