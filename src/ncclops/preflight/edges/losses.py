"""Which hosts, edges and groups lose connections at random; pure.

It takes luck to see that on every edge, so a claim need not have all that it is about.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ncclops.preflight.edges import schedule
from ncclops.preflight.edges.explain import MOST_EDGES, Claim, Edge, as_group, explain
from ncclops.preflight.edges.model import Shape
from ncclops.preflight.edges.states import CHANCE, States

# Edges that have failed once, of one host: so many are no chance.
_FLAKY = 3
# So many of the edges of a group show its losses; everywhere only among so many hosts.
_WIDE, _MANY_HOSTS = 0.2, 5

# A host by where it stands in its edges.
_PLACES: tuple[tuple[Shape, tuple[int, ...]], ...] = (
    ("host-out", (0,)),
    ("host-in", (1,)),
    ("host", (0, 1)),
)
# So many others have to testify that it is one host (as in ``explain``).
_OTHERS = 2

Groups = Mapping[str, Mapping[str, Sequence[int]]]


def losses_of(
    live: Sequence[int],
    found: States,
    doubtful: set[Edge],
    lost: set[Edge],
    groups: Groups,
) -> list[Claim]:
    """What loses connections at random.

    ``doubtful`` edges count beside a host that does, ``lost`` ones say nothing.
    """
    losing = _losing(found, doubtful)
    few = _of_few_hosts(live, losing, losing & (found.loss | found.flaky), lost, groups)
    claims = few or _of_groups(live, losing, found, lost, groups)
    claims = [_witnessed(each, found.loss) for each in claims]
    return [as_group(each, lost.__contains__, groups) for each in claims]


def _witnessed(claim: Claim, sure: set[Edge]) -> Claim:
    """``claim``, which convicts its host only if ``sure`` edges with two others show it."""
    others = {end for edge in claim.explained & sure for end in edge} - {*claim.a}
    is_weak = claim.shape.startswith("host") and len(others) < _OTHERS
    return replace(claim, in_part=True) if is_weak else claim


def _of_groups(
    live: Sequence[int], losing: set[Edge], found: States, lost: set[Edge], groups: Groups
) -> list[Claim]:
    """Everything, or two groups, where all edges lose; and what explains the rest."""
    claims = list[Claim]()
    for by, first, second in _wide(live, groups):
        hits = {edge for edge in losing if _is_between(edge, first, second)}
        # Of all hosts what was not looked at counts as quiet: the rest may be that of a few.
        said_nothing = lost - hits if by else set[Edge]()
        few = bool(by) and len(hits) == len(losing) and _no_chance(hits, lost, live, first, second)
        if not hits or not (few or _everywhere(hits, said_nothing, first, second)):
            continue
        shape: Shape = "group" if by else "everything"
        claim = Claim(shape, tuple(sorted(first)), tuple(sorted(second)), both_ways=bool(by), by=by)
        claims.append(replace(claim, explained=frozenset(hits)))
        losing -= hits
    rest = explain(live, losing, lambda edge: edge in lost or edge in found.flaky, groups)
    return _of_one_host(live, _both_ways([*claims, *rest]), lost, groups)


def _of_few_hosts(
    live: Sequence[int], losing: set[Edge], sure: set[Edge], lost: set[Edge], groups: Groups
) -> list[Claim]:
    """Each of two hosts or more, fewer than half, where all edges that show losses are theirs.

    Each has to show it towards at least half of the others, and, on a ``sure`` edge, towards some
    in every group; among the others all that is known is quiet. Nothing where that is not so: it
    may be everywhere, then, or between groups.
    """
    few = list[int]()
    left = set(losing)
    while left and len(few) <= len(live) // 2:
        touched = Counter(end for edge in left for end in edge)
        few.append(max(sorted(touched), key=lambda each: touched[each]))
        left = {edge for edge in left if few[-1] not in edge}
    others = {*live} - {*few}
    if not 2 <= len(few) < len(others) or not _is_known(others, lost):
        return []
    claims = list[Claim]()
    for host in few:
        own = {edge for edge in losing if host in edge}
        ends = {end for edge in own for end in edge}
        shown = {end for edge in own & sure for end in edge}
        if 2 * len(ends & others) < len(others) or not _is_in_every_group(host, shown, groups):
            return []
        towards = [edge for edge in own if others.intersection(edge)]
        shape, places = next(
            (shape, places)
            for shape, places in _PLACES
            if all(host in (edge[place] for place in places) for edge in towards)
        )
        asked = {(host, n)[:: 1 - 2 * place] for n in others for place in places}
        explained = frozenset(own - {edge for each in claims for edge in each.explained})
        claims.append(Claim(shape, (host,), in_part=bool(asked - own - lost), explained=explained))
    return claims


def _is_known(hosts: set[int], lost: set[Edge]) -> bool:
    """Whether most edges between ``hosts`` have been looked at, and there are some."""
    edges = schedule.edges_between(sorted(hosts), sorted(hosts))
    return len(hosts) > _OTHERS and 2 * len(edges & lost) < len(edges)


def _is_in_every_group(host: int, ends: set[int], groups: Groups) -> bool:
    """Whether some of ``ends`` are in each group that has others than ``host``."""
    members = [{*each} - {host} for named in groups.values() for each in named.values()]
    return all(ends & each for each in members if each)


def _of_one_host(
    live: Sequence[int], losses: list[Claim], lost: set[Edge], groups: Groups
) -> list[Claim]:
    """``losses`` as one host's, where all edges that show any are its own: what one of its rules or
    queues loses shows on each by luck. It has to show towards at least half of the others, and
    towards some in every group that there is."""
    edges = frozenset(edge for each in losses for edge in each.explained)
    if not edges or any(each.shape.startswith("host") for each in losses):
        return losses
    for shape, places in _PLACES:
        hosts = set.intersection(*({edge[place] for place in places} for edge in edges))
        if len(hosts) != 1:
            continue
        (host,) = hosts
        others = {end for edge in edges for end in edge} - hosts
        rest = [each for each in live if each not in others | hosts]
        quiet = [n for n in rest if any((host, n)[:: 1 - 2 * p] not in lost for p in places)]
        is_host_s = _OTHERS <= len(others) >= len(quiet)
        if is_host_s and _is_in_every_group(host, others, groups):
            return [Claim(shape, (host,), in_part=bool(quiet), explained=edges)]
    return losses


def starred(claims: Sequence[Claim], *, both_ways: bool) -> list[Claim]:
    """``claims``, with single edges that have a host in common as one: a host that loses little
    shows it on few edges. Unless ``both_ways``, all lead to that host, or from it."""
    made = list(claims)
    while True:
        single = [each for each in made if each.shape in ("pair", "edge")]
        hubs = Counter(
            (0 if both_ways else place, host)
            for each in single
            for place, side in enumerate((each.a, each.b))
            for host in side
            if both_ways or each.shape == "edge"
        )
        (place, host), count = max(hubs.items(), key=lambda item: item[1], default=((0, 0), 0))
        if count < _OTHERS:
            return made
        explained = frozenset(
            edge
            for each in single
            if (host in (*each.a, *each.b) if both_ways else (each.a, each.b)[place] == (host,))
            if both_ways or each.shape == "edge"
            for edge in each.explained
        )
        made = [each for each in made if not each.explained <= explained]
        ends = (host,), tuple(sorted({end for edge in explained for end in edge} - {host}))
        a, b = ends[::-1] if place else ends
        made.append(Claim("group", a, b, both_ways, explained=explained))


def without_echoes(thin: Sequence[Claim]) -> list[Claim]:
    """Claims of little bandwidth, without edges towards a host whose own data waits: so does its
    answer that all has arrived."""
    made = list[Claim]()
    for claim in sorted(thin, key=lambda each: -len(each.explained)):
        told = {edge for each in made for edge in each.explained}
        if not {edge[::-1] for edge in claim.explained} <= told:
            made.append(claim)
    return made


def _wide(
    live: Sequence[int], groups: Groups
) -> Iterator[tuple[str, frozenset[int], frozenset[int]]]:
    """Between groups, and everywhere: what may lose so much that many edges show it."""
    for by, named in groups.items():
        for (a, first), (b, second) in itertools.combinations(named.items(), 2):
            if min(len(first), len(second)) >= 2:
                yield f"{by}: {a}, {b}", frozenset(first), frozenset(second)
    if len(live) >= _MANY_HOSTS:
        yield "", frozenset(live), frozenset(live)


def often_flaky(found: States, without: Collection[Edge] = ()) -> set[int]:
    """Hosts with so many edges that have failed once, or lose connections, that it is no chance;
    not counting those ``without`` which they are."""
    return {end for end, count in _troubled(found, without).items() if count >= _FLAKY}


def _troubled(found: States, without: Collection[Edge] = ()) -> Counter[int]:
    """How many edges of each host have failed once, or lose connections."""
    return Counter(end for edge in (found.loss | found.flaky).difference(without) for end in edge)


def _losing(found: States, doubtful: set[Edge]) -> set[Edge]:
    """Edges that lose connections; beside a host that does, what is doubtful is the same."""
    often = _troubled(found)
    many = often_flaky(found)
    sure = found.loss | {edge for edge in found.flaky if many.intersection(edge)}
    ends = {end for a, b in sure for end, other in ((a, b), (b, a)) if often[end] >= often[other]}
    return sure | {edge for edge in doubtful if ends.intersection(edge)}


def _is_between(edge: Edge, first: Collection[int], second: Collection[int]) -> bool:
    src, dst = edge
    return (src in first and dst in second) or (src in second and dst in first)


def _everywhere(
    hits: set[Edge], lost: set[Edge], first: frozenset[int], second: frozenset[int]
) -> bool:
    """Whether ``hits`` are many of the edges that are not ``lost``, and still are without the worst
    host of each side. Edges are counted, not listed: thousands of hosts have millions."""
    touched = Counter(end for edge in hits for end in edge)
    worst = {max(sorted(side), key=lambda each: touched[each]) for side in (first, second)}
    for without in (set[int](), worst):
        a, b = first - without, second - without
        every = len(a) * (len(a) - 1) if a == b else 2 * len(a) * len(b)
        looked = every - sum(_is_between(edge, a, b) for edge in lost)
        shown = sum(_is_between(edge, a, b) for edge in hits)
        if not shown or shown < _WIDE * looked:
            return False
    return True


def _no_chance(
    hits: set[Edge],
    lost: set[Edge],
    live: Sequence[int],
    first: frozenset[int],
    second: frozenset[int],
) -> bool:
    """Whether ``hits``, all that lose, would not lie between two groups by chance, and are not
    those of the worst host of a side: what loses little shows it on few edges."""
    between = 2 * len(first) * len(second) - sum(_is_between(edge, first, second) for edge in lost)
    share = between / max(1, len(live) * (len(live) - 1) - len(lost))
    touched = Counter(end for edge in hits for end in edge)
    worst = {max(sorted(side), key=lambda each: touched[each]) for side in (first, second)}
    left = [edge for edge in hits if not worst.intersection(edge)]
    return len(left) >= _OTHERS and share ** len(hits) < CHANCE


def _both_ways(losses: Sequence[Claim]) -> list[Claim]:
    """A lost packet ends connections that either side opens: claims that are about one host, or
    that mirror each other, are one. Many without a common shape are one as well."""
    made = list[Claim]()
    for claim in sorted(losses, key=lambda each: (not _hub(each), -len(each.explained))):
        mirrored = {edge[::-1] for edge in claim.explained}
        for place, before in enumerate(made):
            hub, about = _hub(before), _about(before)
            if mirrored <= about or (hub and all(hub & {*edge} for edge in claim.explained)):
                made[place] = _joined(before, claim)
                break
        else:
            made.append(claim)
    made = starred(made, both_ways=True)
    loose = [each for each in made if not each.shape.startswith("host")]
    if len(loose) <= MOST_EDGES:
        return made
    edges = frozenset(edge for each in loose for edge in each.explained)
    ends = tuple(sorted({src for src, _ in edges})), tuple(sorted({dst for _, dst in edges}))
    rest = [each for each in made if each.shape.startswith("host")]
    return [*rest, Claim("several", *ends, explained=edges)]


def _hub(claim: Claim) -> set[int]:
    """The one host that all edges of a claim have in common; empty where there is none, or two."""
    if claim.shape.startswith("host"):
        return {*claim.a}
    sides = [each for each in (claim.a, claim.b) if len(each) == 1]
    return {*sides[0]} if claim.shape == "group" and sides else set()


def _about(claim: Claim) -> set[Edge]:
    return set() if claim.shape == "several" else schedule.edges_between(claim.a, claim.b)


def _joined(one: Claim, other: Claim) -> Claim:
    """``one``, with what ``other`` explains."""
    explained, hub = one.explained | other.explained, _hub(one)
    if not hub or one.shape.startswith("host"):
        return replace(one, both_ways=bool(one.b), explained=explained)
    others = {end for edge in explained for end in edge} - hub
    a, b = tuple(hub), tuple(sorted(others))
    return replace(one, a=a, b=b, both_ways=True, explained=explained)
