"""What became of each edge, from what all hosts saw in both rounds; pure."""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from ncclops.preflight.edges import schedule
from ncclops.preflight.edges.explain import Edge
from ncclops.preflight.edges.interface import is_loopback
from ncclops.preflight.edges.model import Facts, How, Outcome, Seen

_LARGE = ("large-out", "large-in")
# So many connections over an edge have to be lost at random: each has sent its SYN three times.
LOSSES = 2
# What a lost packet looks like; and so many of them may be chance.
LOST = ("timeout", "silent")
_FEW = 3
# So many packets lost over an edge make it worth a second look; of those of the second, so many,
# and this share. In the first many hosts at once may be too much for a switch, and large packets
# may be what teaches a host the path's MTU.
NOTED, _RESENT, RESENT_SHARE = 2, 3, 0.02
# Round trips above this are reported, for the comparison with those of the others: more than any
# network within a building has (docs/preflight.md).
NOTABLE_RTT_MS = 5.0
# Likewise of the time for 64 KiB: 5 Mbit/s. Faster links cannot be told apart by so little data.
NOTABLE_DATA_S = 0.1
# Edges of one host whose ports are blocked: so many say that it is more than an edge.
_SAME = 2
# Of few losses there is no telling how many: so large a share of all connections may be lost.
LEAST_LOST = 0.3
# What is less likely is no chance.
CHANCE, _UNLIKELY = 0.001, 0.05


@dataclass
class States:
    """Edges by what is wrong with them; those in none of the sets work.

    ``unknown``: not tried, or failed once and not tried again while others recovered. ``large``:
    data from the first to the second is lost. ``unknown_large``: not looked at. ``flaky``: failed
    once, then passed. ``loss``: connections fail at random; ``stalled``: one does, or data.
    ``resending``: packets are lost, over connections that pass. ``unsure_resending``: perhaps.
    ``ended``: of the dead ones, those over which some connections passed at first.
    ``blocked``: of edges that lose connections, or may, the slots that fail for a rule for ports.
    ``unsure``: of those whose ports fail, where it may be chance and was not looked into. ``seen``
    is what was seen last.
    """

    dead: set[Edge] = field(default_factory=set)
    ports: set[Edge] = field(default_factory=set)
    store_port: set[Edge] = field(default_factory=set)
    large: set[Edge] = field(default_factory=set)
    unknown: set[Edge] = field(default_factory=set)
    unknown_large: set[Edge] = field(default_factory=set)
    unsure: set[Edge] = field(default_factory=set)
    ended: set[Edge] = field(default_factory=set)
    loss: set[Edge] = field(default_factory=set)
    flaky: set[Edge] = field(default_factory=set)
    stalled: set[Edge] = field(default_factory=set)
    resending: set[Edge] = field(default_factory=set)
    unsure_resending: set[Edge] = field(default_factory=set)
    rtt_ms: dict[Edge, float] = field(default_factory=dict)
    data_s: dict[Edge, float] = field(default_factory=dict)
    seen: dict[Edge, Seen] = field(default_factory=dict)
    blocked: dict[Edge, set[int]] = field(default_factory=dict)
    tested: dict[Edge, frozenset[int]] = field(default_factory=dict)

    def of_ports(self, edge: Edge) -> Collection[int]:
        """The slots of ``edge`` that fail, without those that are lost at random."""
        failed = self.seen[edge].failed
        return self.blocked.get(edge, set()) if edge in self.loss | self.flaky else failed

    def lost_at_random(self, edge: Edge) -> int:
        """How many connections of ``edge``, which loses some, have failed for no rule for ports:
        also those that there was no time to repeat."""
        seen = self.seen[edge]
        chance = {slot for slot, how in seen.failed.items() if how in LOST}
        return seen.lost + len(chance.difference(seen.unanswered, self.blocked.get(edge, ())))


def settle(
    hosts: tuple[Facts, ...],
    live: set[int],
    first: Mapping[int, Outcome],
    second: Mapping[int, Outcome],
) -> States:
    """The state of every edge between ``live`` hosts."""
    states = States()
    again = {(src, each.dst): each for src, one in second.items() for each in one.seen}
    wholly = {edge for edge in again if edge[1] not in second[edge[0]].skipped}
    recovered: Counter[int] = Counter()
    first = {src: each for src, each in first.items() if src in live}
    for src, outcome in first.items():
        for seen in outcome.seen:
            once_more = again.get((src, seen.dst))
            if once_more is None or not seen.failed:
                continue
            if once_more.lost or not once_more.failed:
                recovered.update((src, seen.dst))
    for src in live:
        if src not in first:
            missed = schedule.edges_between((src,), live)
            states.unknown |= missed
            states.unknown_large |= missed | schedule.edges_between(live, (src,))
            continue
        outcome = first[src]
        late = {(src, dst) for dst in live.intersection(outcome.skipped)}
        skipped = late - again.keys()
        states.unknown |= skipped
        states.unknown_large |= skipped
        for seen in outcome.seen:
            edge = (src, seen.dst)
            if seen.dst not in live or edge in skipped:
                continue
            last = _both(seen, again.get(edge))
            if seen.failed and edge not in again and (recovered[src] or recovered[seen.dst]):
                states.unknown.add(edge)
                states.unknown_large.add(edge)
                continue
            if edge in late and edge not in wholly and last.passed and losses(last) < LOSSES:
                states.unknown.add(edge)  # time ran out in both rounds: what failed may be chance
                states.unknown_large.add(edge)
                continue
            if _doubtful(last):
                states.stalled.add(edge)
            if losses(last) >= LOSSES:
                states.loss.add(edge)
            elif (seen.failed and not last.failed) or _doubtful(last):
                states.flaky.add(edge)
            if seen.passed and not last.passed:
                states.ended.add(edge)
            _place(states, edge, last)
            if seen.resent >= NOTED and (edge not in again or again[edge].resent):
                is_sure = edge in again and _resends(again[edge])
                (states.resending if is_sure else states.unsure_resending).add(edge)
            if last.stalled:  # for whatever reason: that large packets pass is not known
                states.unknown_large |= {edge, edge[::-1]}
            if edge in states.ports | states.store_port and not last.repeated:
                states.unsure |= {edge} if doubtful(last.failed, last.passed) else set()
    lossy = {edge for edge in states.loss | states.flaky | states.ports if edge in again}
    looks = {(src, each.dst): each for src, one in first.items() for each in one.seen}
    for edges in _by_end(lossy):
        _block(hosts, states, edges, (looks, again))
    for edges in (states.unsure, *_by_end(states.unsure)):
        if _agree(hosts, states, edges) or _is_one_range(hosts, states, edges):
            states.unsure = states.unsure - edges
    _measured_there(states, live, first)
    # What fails is said with its own cause.
    states.resending -= states.dead | states.large
    _doubt_once(states, wholly)
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


def _measured_there(states: States, live: set[int], first: Mapping[int, Outcome]) -> None:
    """Both ends measure how long data takes each way, and report what takes notably long, or fails:
    the end that has looked and reports nothing of the edge has measured less."""
    told = {(src, each.dst): each for src, one in first.items() for each in one.seen}
    for way in states.data_s:
        for here, there in (way, way[::-1]):
            if here not in first or there not in live:
                continue
            if (seen := told.get((here, there))) is not None:
                took_s = seen.out_s if here == way[0] else seen.in_s
            else:
                took_s = -1.0 if there in first[here].skipped else NOTABLE_DATA_S
            if took_s >= 0:
                states.data_s[way] = min(states.data_s[way], took_s)


def _by_end(edges: Collection[Edge]) -> list[set[Edge]]:
    """``edges`` by the host that they lead to, and by the one that they come from."""
    made: dict[tuple[int, int], set[Edge]] = defaultdict(set)
    for edge in edges:
        for place in (1, 0):
            made[place, edge[place]].add(edge)
    return list(made.values())


def _agree(hosts: tuple[Facts, ...], states: States, edges: Collection[Edge]) -> bool:
    """Whether each port fails on all of ``edges`` or on none, and chance would not do that."""
    failed, passed = Counter[int](), Counter[int]()
    for edge in edges:
        ports, seen = hosts[edge[1]].ports, states.seen[edge]
        failed.update(ports[slot] for slot in seen.failed)
        passed.update(ports[slot] for slot in seen.passed)
    if not failed or failed.keys() & passed.keys():
        return False
    share = failed.total() / (failed.total() + passed.total())
    tries = (failed | passed).values()
    return math.prod(share**count + (1 - share) ** count for count in tries) < CHANCE


def _block(
    hosts: tuple[Facts, ...],
    states: States,
    edges: Collection[Edge],
    looks: tuple[Mapping[Edge, Seen], Mapping[Edge, Seen]],
) -> None:
    """Note which slots of ``edges`` fail for a rule for ports, while others are lost at random: the
    longest run of ports that have failed in both rounds, on edges where chance would not do that.
    """
    _, again = looks
    beyond = sorted({hosts[e[1]].ports[slot] for e in edges for slot in states.seen[e].passed})
    runs: dict[int, dict[Edge, set[int]]] = defaultdict(lambda: defaultdict(set))
    for edge in edges:
        for slot, how in again[edge].failed.items():
            if how in LOST and slot not in again[edge].unanswered:
                runs[bisect.bisect(beyond, hosts[edge[1]].ports[slot])][edge].add(slot)
    longest = max(runs.values(), key=lambda run: sum(map(len, run.values())), default={})
    chances = dict[Edge, float]()
    for edge, slots in longest.items():
        share = max(LEAST_LOST, *(_share_lost(look[edge], slots) for look in looks))
        if (chance := share ** len(slots)) < _UNLIKELY:
            chances[edge] = chance
    if not beyond or math.prod(chances.values()) * len(beyond) >= CHANCE:
        return
    for edge in chances:
        states.blocked.setdefault(edge, set()).update(longest[edge])
        states.ports.add(edge)
        states.unsure.discard(edge)


def _share_lost(seen: Seen, beside: Collection[int]) -> float:
    """How much of what was tried ``beside`` those slots was lost, also if it passed at last."""
    lost, passed = len({*seen.failed}.difference(beside)) + seen.lost, {*seen.passed}
    return lost / max(1, len(passed.difference(beside)) + lost - seen.lost)


def _is_one_range(hosts: tuple[Facts, ...], states: States, edges: Collection[Edge]) -> bool:
    """Whether all that fails on ``edges`` has its port, or the one it was opened from, between two
    beside each other of those that passed, and chance would not do that: a rule without state."""
    failed, passed = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for edge in edges:
        ports, seen = hosts[edge[1]].ports, states.seen[edge]
        for slots, ends in ((seen.failed, failed), (seen.passed, passed)):
            known = (slot for slot in slots if slots is seen.passed or slot in seen.sources)
            ends += [(ports[slot], seen.sources.get(slot, ports[slot])) for slot in known]
    if not failed or not passed:
        return False
    beyond = sorted({0, 1 << 16, *(port for each in passed for port in each)})
    gaps = [{bisect.bisect(beyond, port) for port in each} for each in failed]
    share = len(failed) / (len(failed) + len(passed))
    by_chance = len(failed) * math.log(share) + len(passed) * math.log(1 - share)
    ranges = math.log(2 * (len(failed) + len(passed)) ** 2)  # that two of all ports may end
    return bool(set.intersection(*gaps)) and by_chance + ranges < math.log(CHANCE)


def with_many(edges: Iterable[Edge]) -> set[int]:
    """The hosts that have so many of ``edges`` that it is more than an edge."""
    counts = Counter(end for edge in edges for end in edge)
    return {end for end, count in counts.items() if count >= _SAME}


def _doubt_once(states: States, again: Collection[Edge]) -> None:
    """Beside a host whose ports are blocked, ports that all failed once may be blocked as well, and
    so may the few that failed at last where others had passed."""
    hosts = with_many(states.ports)
    for edge in states.dead - (set(again) - states.ended):
        lost = all(how in LOST for how in states.seen[edge].failed.values())
        if lost and hosts.intersection(edge):
            states.dead.discard(edge)
            states.unknown.add(edge)


def _recovered(seen: Seen, again: Seen) -> int:
    """How many connections of the first round passed in the second, at the same ports of the host,
    unless the local ports that they were opened from make a rule of it."""
    if again.failed and not again.repeated:
        return 0  # it was not looked into
    lost = [slot for slot, how in seen.failed.items() if how in LOST and slot in again.passed]
    slots = [slot for slot in lost if slot not in seen.unanswered]
    failed = [seen.sources[slot] for slot in slots if slot in seen.sources]
    passed = [seen.sources[slot] for slot in seen.passed if slot in seen.sources]
    return len(slots) if len(slots) >= LOSSES and scattered(failed, passed) else 0


def losses(seen: Seen) -> int:
    """How many connections were lost at random: those that passed when they were repeated, and
    those that stood and got no answer, where others got one. No rule for ports does that."""
    asked = seen.failed.keys() - {*seen.unanswered} if seen.passed else ()
    hung = sum(seen.failed[slot] == "silent" for slot in asked)
    return seen.lost + hung


def _resends(seen: Seen) -> bool:
    return seen.resent >= max(_RESENT, RESENT_SHARE * seen.sent)


def _doubtful(seen: Seen) -> bool:
    return bool(seen.lost) or seen.stalled


def scattered(failed: Iterable[int], passed: Iterable[int]) -> bool:
    """Whether something between those that failed passes: no rule for a range of ports."""
    ends = sorted(failed)
    return bool(ends) and any(ends[0] < each < ends[-1] for each in passed)


def doubtful(failed: Mapping[int, How], passed: Collection[int]) -> bool:
    """Whether these slots may have failed by chance: few of them, or here and there."""
    slots = [slot for slot, how in failed.items() if how in LOST]
    return bool(slots and passed) and (len(slots) <= _FEW or scattered(slots, passed))


def _both(seen: Seen, again: Seen | None) -> Seen:
    """What the second look says, and which ports passed at the first."""
    if again is None:
        return seen
    passed = {*again.passed, *seen.passed} - again.failed.keys()
    if _ended(seen, again):
        passed = set()
    # What there was no time to try again has failed once.
    failed = {slot: how for slot, how in seen.failed.items() if slot not in passed}
    late = bool(again.passed and failed.keys() - again.failed.keys())
    return msgspec.structs.replace(
        again,
        failed=(failed | again.failed) if late else again.failed,
        repeated=again.repeated and not late,
        lost=max(again.lost, _recovered(seen, again)),
        passed=tuple(sorted(passed)),
        rtt_ms=_least(seen.rtt_ms, again.rtt_ms),
        out_s=_least(seen.out_s, again.out_s),
        in_s=_least(seen.in_s, again.in_s),
        sent=seen.sent + again.sent,
        resent=seen.resent + again.resent,
        opening=seen.opening + again.opening,
    )


def _ended(seen: Seen, again: Seen) -> bool:
    """Whether nothing passes any more, not even to ports that passed: a rule that counts, or a way
    that broke meanwhile. What stood and got no answer may be a process that stood still."""
    lost_again = again.failed.keys() & {*seen.passed}
    return bool(lost_again) and not again.passed and {*again.failed.values()} == {"timeout"}


def _least(*times: float) -> float:
    return min((each for each in times if each >= 0), default=-1.0)


def _place(states: States, edge: Edge, seen: Seen) -> None:
    states.seen[edge] = seen
    large = {how for how in seen.failed.values() if how in _LARGE}
    blocked = {slot for slot, how in seen.failed.items() if how not in _LARGE}
    states.tested[edge] = frozenset({*seen.failed, *seen.passed})
    if blocked and not seen.passed and not large:
        states.dead.add(edge)
        states.unknown_large.add(edge)
        return
    if edge in states.loss or edge in states.flaky:
        blocked = set()  # of the ports nothing is known
    chance = [slot for slot, how in seen.failed.items() if how in LOST]
    lossy = edge in states.loss or (edge in states.flaky and not seen.stalled)
    if lossy or (len(chance) >= LOSSES and scattered(chance, seen.passed)):
        large = set()  # nor of sizes: they were lost as the rest was
        states.unknown_large |= {edge, edge[::-1]}
    if blocked == {0}:
        states.store_port.add(edge)
    elif blocked:
        states.ports.add(edge)
    if seen.rtt_ms >= 0:
        states.rtt_ms[edge] = seen.rtt_ms
    for way, took_s in ((edge, seen.out_s), (edge[::-1], seen.in_s)):
        if took_s >= 0:  # each way is measured from both ends
            states.data_s[way] = min(took_s, states.data_s.get(way, took_s))
    if "large-out" in large:
        states.large.add(edge)
    if "large-in" in large:
        states.large.add((edge[1], edge[0]))
