"""What came of the meeting -> the verdict: which causes, and what speaks for each; pure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from ncclops.preflight.edges import known, replies, schedule, states, wire
from ncclops.preflight.edges.addresses import Addresses
from ncclops.preflight.edges.explain import Claim, Edge, as_group, explain
from ncclops.preflight.edges.interface import subnet
from ncclops.preflight.edges.loss_ways import directed
from ncclops.preflight.edges.losses import losses_of, often_flaky, starred, without_echoes
from ncclops.preflight.edges.model import (
    Cause,
    Facts,
    Outcome,
    Severity,
    Symptom,
    Verdict,
)
from ncclops.preflight.edges.states import NOTABLE_DATA_S, NOTABLE_RTT_MS, States

# A round trip is slow at ten times the median of the cluster, if it is above what any network of
# one building has. Where all of them are above this (a queue, another continent), all are slow.
# And always by so many of the standard deviations that the hosts' medians have (by their MAD).
_SLOW_RATIO, _SLOW_MS, _SLOW_SPREADS = 10.0, 50.0, 10.0
_MATRIX_UP_TO = 64
_NAMED = 16
# Of all connections over the edges of a cause: above this a job would not come up.
_MANY_LOST = 0.05
# Likewise of the packets: the kernel hides it, and makes the job slow.
_MANY_RESENT = 0.1


def judge(
    hosts: tuple[Facts, ...],
    first: Mapping[int, Outcome],
    second: Mapping[int, Outcome],
    *,
    missing: tuple[str, ...] = (),
    expected: int = 0,
    least: int = 0,
    seconds: float = 0.0,
    answering: Collection[int] = (),
) -> Verdict:
    """The verdict on ``hosts``, of which ``expected`` were to come and ``least`` are needed.

    ``answering``: of those that have not reported, who answers connections at the end.
    """
    out, causes = known.who_is_out(hosts, first, second, answering)
    live = set(range(len(hosts))) - out
    found = states.settle(hosts, live, first, second)
    look = _Look(hosts, sorted(live), found, {n: each for n, each in first.items() if n in live})
    made = look.causes()
    # Those that answer others: what they say is lost, unless nothing else shows that.
    named = {each for cause in made if cause.kind == "loss" for each in (*cause.a, *cause.b)}
    unheard = [n for n in known.unheard(hosts, first, second) if n in live - named]
    causes += [*made, *known.without_report(hosts, unheard, answering)]
    causes += known.remarks(hosts, first)
    told = {cause.facts.get("address") for cause in causes if cause.kind == "duplicate-address"}
    lossy = found.dead | found.loss | found.resending
    trouble = bool(lossy) or len(hosts) < expected
    causes += known.claimed_elsewhere(hosts, told, trouble=trouble)
    if len(hosts) < expected:
        severity: Severity = "FAIL" if len(hosts) < least else "WARN"
        names = ", ".join(missing) or f"{expected - len(hosts)} of {expected}"
        causes.insert(
            0,
            Cause(
                kind="missing",
                severity=severity,
                shape="several",
                symptom="dead",
                a=(),
                facts={
                    "names": names,
                    "came": ", ".join(each.name for each in hosts[:_NAMED]),
                    "expected": str(expected),
                    "count": str(len(hosts)),
                },
            ),
        )
    order = {"FAIL": 0, "WARN": 1, "CANNOT-TELL": 2}
    return Verdict(
        hosts=hosts,
        causes=tuple(sorted(causes, key=lambda each: order[each.severity])),
        missing=missing,
        expected=expected or len(hosts),
        edges=len(hosts) * (len(hosts) - 1),
        failed_edges=len(found.dead | found.ports | found.large | found.loss | found.resending),
        unknown_edges=len(found.unknown | (found.unsure - look.answers))
        + len(hosts) * (len(hosts) - 1)
        - len(live) * (len(live) - 1),
        rtt_ms=look.usual_ms,
        seconds=round(seconds, 1),
        matrix=look.matrix(out) if len(hosts) <= _MATRIX_UP_TO else (),
    )


class _Look:
    """The edges of the hosts that are left, by symptom, and what explains them."""

    def __init__(
        self,
        hosts: tuple[Facts, ...],
        live: list[int],
        found: States,
        first: Mapping[int, Outcome],
    ) -> None:
        self._hosts, self._live, self._found, self._first = hosts, live, found, first
        self._groups = _groups(hosts, live)
        self._addresses = Addresses(hosts, live, found, first)
        usual = [each.rtt_ms for each in first.values() if each.rtt_ms >= 0]
        self.usual_ms = round(statistics.median(usual), 3) if usual else -1.0
        limit = _beyond(usual, NOTABLE_RTT_MS)
        if self.usual_ms > _SLOW_MS:
            every = schedule.edges_between(live, live)
            if min((found.rtt_ms.get(edge, -1.0) for edge in every), default=0.0) > _SLOW_MS:
                limit = _SLOW_MS
        self._slow = {edge for edge, ms in found.rtt_ms.items() if ms > limit}
        took = [each.data_s for each in first.values() if each.data_s >= 0]
        self._usual_s = statistics.median(took) if took else 0.0
        thin = _beyond(took, NOTABLE_DATA_S)
        # Many round trips take long as well: what is slow is said to be, and no more.
        slow = self._slow | {edge[::-1] for edge in self._slow}
        self._thin = {edge for edge, took_s in found.data_s.items() if took_s > thin} - slow
        self._answers = replies.answers(hosts, found)
        self.answers = self._answers.keys()

    def causes(self) -> list[Cause]:
        found, answers = self._found, self.answers
        lost = found.dead | found.unknown | found.unsure | answers
        # What is doubtful with a host whose ports are blocked is no word on the other end.
        blocking = states.with_many(found.ports - answers - found.unsure)
        beside = {edge for edge in found.unsure if blocking.intersection(edge)}
        waiting = self._thin - self._of_thin_hosts(lost)
        doubtful = (found.unsure - answers - beside) | found.flaky | waiting
        # First: what is within them may be chance.
        losses = losses_of(self._live, found, doubtful, lost, self._groups)
        # A host that stood still for some seconds has failed once, and lost nothing at random; nor
        # has one of which all that failed is blocked by a rule for ports.
        at_random = {each for each in found.loss if found.lost_at_random(each)} | found.stalled
        losses = [each for each in losses if each.explained & at_random]
        chance = self._within(losses)
        packets = self._packets(lost)
        inside = self._within(packets)
        losses = [each for each in losses if not each.explained <= inside]
        # Packets to an address that another machine has as well go now here, now there.
        losses, packets = self._without_clashes(losses), self._without_clashes(packets)
        ending = [
            self._cause("loss", directed(claim, found, self._live)) for claim in (*packets, *losses)
        ]
        share = self._share_lost(losses)
        by_chance = {edge for edge in chance if self._may_be_chance(edge, share)}
        # Of which some connections fail, and nobody has looked why, is not known to work either.
        doubtful = found.unknown | found.unsure | found.flaky | found.loss | by_chance
        # Where some are lost at random, and others pass, nothing is dead.
        doubtful -= {edge for edge in found.loss if found.seen[edge].passed}
        dead = found.dead - answers - by_chance
        ports = found.ports - answers - found.unsure - by_chance
        made = self._explained("dead", dead, lambda edge: edge in doubtful or edge in answers)
        made = known.one_an_address(made)
        ports_doubtful = lost | found.flaky | found.loss | by_chance
        made += self._explained("ports", ports, self._ports_unknown(ports, ports_doubtful))
        made += self._explained(
            "ports",
            found.store_port - found.unsure,
            self._ports_unknown(found.store_port, lost),
            store=True,
        )
        large = found.large - chance
        # What was sent again may have been sent in smaller packets.
        resent = found.resending | found.unsure_resending
        not_known = found.unknown_large | lost | chance | resent
        # A connection carries data both ways, whoever opened it; the way back is not looked at
        # where the way there loses it.
        sizes = self._claims(
            large, lambda edge: edge in not_known and edge[::-1] in not_known | large
        )
        made += [self._cause("large", claim) for claim in self._with_stars("large", sizes)]
        made += ending
        chance |= inside
        lost |= chance
        seen = found.seen.keys()
        no_data = {
            e for e in seen - found.data_s.keys() if e[::-1] in seen or e[::-1] in lost
        } | lost
        thin = without_echoes(self._claims(self._thin - chance, no_data.__contains__))
        # Data that was sent again takes long: one edge, among several that lose some, is no other.
        # Not where all that is lost is so between groups, and the edge is of none.
        often = often_flaky(found, without=self._within([each for each in losses if each.by]))
        thin = [each for each in thin if len(each.explained) > 1 or not often & {*each.a, *each.b}]
        thin = starred(thin, both_ways=False)
        made += [self._cause("bandwidth", claim) for claim in thin]
        # It takes as long whoever asks; and the kernel's is no longer for packets that are lost.
        slow = self._slow | ({edge[::-1] for edge in self._slow} & lost)
        no_trip = (seen - found.rtt_ms.keys()) | lost
        made += self._explained("slow", slow, no_trip.__contains__)
        # Few lost packets end a connection here, and keep data waiting there.
        hubs = {end for claim in thin for side in _smaller_ends(claim) for end in side}
        flaky = found.flaky - chance - self._within([*thin, *sizes])
        flaky = {edge for edge in flaky if not hubs & {*edge}}
        made += self._flaky(flaky) if flaky and not ending else []
        # Beside a cause of their hosts they may be of the same; else they are not passed over.
        named = {host for each in made for host in (*each.a, *each.b)}
        unsure = {edge for edge in found.unsure - answers if not named & {*edge}}
        return made + (self._flaky(unsure, why="unknown") if unsure else [])

    def _of_thin_hosts(self, lost: set[Edge]) -> set[Edge]:
        """The thin edges of hosts that have no other way, and lose no connection."""
        losing = {end for edge in self._found.loss | self._found.flaky for end in edge}
        claims = self._claims(self._thin, lost.__contains__)
        whole = [each for each in claims if each.shape.startswith("host")]
        return {edge for each in whole if not losing & {*each.a} for edge in each.explained}

    def _packets(self, lost: set[Edge]) -> list[Claim]:
        """What loses packets, by what the kernel had to send again."""
        found, unsure = self._found, self._found.unsure_resending
        resending = states.States(loss=found.resending)
        # What is thin has a queue that is full, or loses packets as well.
        lost = lost | unsure | self._thin
        return losses_of(self._live, resending, unsure, lost, self._groups)

    def _without_clashes(self, claims: list[Claim]) -> list[Claim]:
        """``claims``, without edges of one host whose address another machine answers for."""

        def is_clash(claim: Claim) -> bool:
            common = set.intersection(*({*edge} for edge in claim.explained))
            return any(self._hosts[each].conflict for each in common)

        return [each for each in claims if not is_clash(each)]

    def _share_lost(self, losses: Sequence[Claim]) -> float:
        """Of the connections of an edge, the share that is lost at random where it is most."""
        edges = {edge for each in losses for edge in each.explained} & self._found.seen.keys()
        looked = [seen for each in edges if (seen := self._found.seen[each]).passed]
        shares = [states.losses(each) / (len(each.failed) + len(each.passed)) for each in looked]
        return max((states.LEAST_LOST, *shares))

    def _may_be_chance(self, edge: Edge, share: float) -> bool:
        """Whether ``edge`` fails as one does that loses that share of its connections."""
        seen = self._found.seen.get(edge)
        if seen is None:
            return True
        if edge in self._found.blocked:
            return False
        is_likely = edge not in self._found.dead or share ** len(seen.failed) > states.CHANCE
        return is_likely and {*seen.failed.values()} <= {*states.LOST}

    def _within(self, claims: Sequence[Claim]) -> set[Edge]:
        """All edges that ``claims`` are about, both ways."""
        edges = set[Edge]()
        for claim in claims:
            others = self._live if claim.shape.startswith("host") else claim.b
            whole = claim.shape != "several"
            edges |= schedule.edges_between(claim.a, others) if whole else claim.explained
        return edges | {edge[::-1] for edge in edges}

    def _claims(self, edges: set[Edge], unknown: Callable[[Edge], bool]) -> list[Claim]:
        claims = explain(self._live, edges, unknown, self._groups)
        return [as_group(each, unknown, self._groups) for each in claims]

    def _with_stars(self, symptom: Symptom, claims: list[Claim]) -> list[Claim]:
        """``claims``, with the single edges of one host that fail in one way as one: that two
        things break at one host in the same way is less likely than that one does."""
        made, alike = list[Claim](), defaultdict[tuple[str, str], list[Claim]](list)
        for each in claims:
            if each.shape in ("pair", "edge"):
                alike[each.shape, self._how(symptom, each)].append(each)
            else:
                made.append(each)
        for (shape, _), single in alike.items():
            made += starred(single, both_ways=shape == "pair")
        return made

    def _how(self, symptom: Symptom, claim: Claim) -> str:
        """How most of its connections fail."""
        details = [self._found.seen[e] for e in claim.explained if e in self._found.seen]
        hows = Counter(how for each in details for how in each.failed.values() if _of(symptom, how))
        return hows.most_common(1)[0][0] if hows else ""

    def _explained(
        self,
        symptom: Symptom,
        edges: set[Edge],
        unknown: Callable[[Edge], bool],
        *,
        store: bool = False,
    ) -> list[Cause]:
        claims = self._claims(edges, unknown)
        if symptom == "dead":
            claims = self._with_stars(symptom, claims)
        return [self._cause(symptom, claim, store=store) for claim in claims]

    def _ports_unknown(self, edges: set[Edge], lost: set[Edge]) -> Callable[[Edge], bool]:
        """Whether an edge that works has not tried any port that failed elsewhere."""
        n = len(self._hosts)
        blocked = {slot for edge in edges for slot in self._found.of_ports(edge)}

        def unknown(edge: Edge) -> bool:
            if edge in lost:
                return True
            tested = self._found.tested.get(edge)
            if tested is None:
                count = len(self._hosts[edge[1]].ports) - 1
                tested = frozenset(schedule.slots(n, *edge, count))
            return not tested & blocked

        return unknown

    def _flaky(self, edges: set[Edge], **facts: str) -> list[Cause]:
        a = tuple(sorted({src for src, _ in edges}))
        b = tuple(sorted({dst for _, dst in edges}))
        return [
            Cause(
                kind="flaky",
                severity="CANNOT-TELL",
                shape="several" if len(edges) > 1 else "edge",
                symptom="flaky",
                a=a,
                b=b,
                edges=len(edges),
                facts=facts,
            )
        ]

    # --- one cause ------------------------------------------------------------------------------

    def _cause(self, symptom: Symptom, claim: Claim, *, store: bool = False) -> Cause:
        edges = claim.explained
        details = [self._found.seen[each] for each in edges if each in self._found.seen]
        facts = self._evidence(symptom, claim)
        severity: Severity = "WARN" if symptom in ("slow", "bandwidth") else "FAIL"
        if symptom == "loss":
            few = int(facts["lost"]) < _MANY_LOST * int(facts["tried"])
            # One way may lose them all, so no mean.
            if few and all(each.resent <= _MANY_RESENT * each.sent for each in details):
                severity = "WARN"
        blocked, open_ = self._ports(edges) if symptom == "ports" else ((), ())
        if store:
            named = any(self._hosts[dst].named_port for _, dst in edges)
            severity = "FAIL" if named else "WARN"
        return Cause(
            kind=self._kind(symptom, facts, store=store),
            severity=severity,
            shape=claim.shape,
            symptom=symptom,
            a=claim.a,
            b=claim.b,
            edges=len(edges) + int(facts.get("answers", "0")),
            how=self._how(symptom, claim),
            both_ways=claim.both_ways,
            blocked=blocked,
            open=open_,
            hosts=self._convicted(claim) if severity == "FAIL" else (),
            facts=facts,
        )

    @staticmethod
    def _kind(symptom: Symptom, facts: dict[str, str], *, store: bool) -> str:
        if symptom == "dead":
            if "their_mac" in facts or "other" in facts:
                return "duplicate-address"
            if "everywhere" in facts:
                return "address-everywhere"
            if "better" in facts:
                return "wrong-interface"
            if "lacks" in facts:
                return "interface-missing"
            return "unreachable"
        return "store-port" if store else "mtu" if symptom == "large" else symptom

    @staticmethod
    def _convicted(claim: Claim) -> tuple[int, ...]:
        """Hosts that a scheduler should leave out: only where it is the host, whoever asks."""
        is_host = claim.shape in ("host", "host-in", "host-out") and not claim.in_part
        return claim.a if is_host else ()

    def _evidence(self, symptom: Symptom, claim: Claim) -> dict[str, str]:
        facts: dict[str, str] = {}
        facts |= {"by": claim.by} if claim.by else {}
        facts |= {"way": claim.way} if claim.way else {}
        if symptom == "dead":
            facts |= self._addresses.evidence(claim)
            facts |= {"ended": "yes"} if claim.explained & self._found.ended else {}
        if symptom == "ports":
            own = [each for each in self._answers.values() if each in claim.explained]
            facts |= {"answers": str(len(own))} if own else {}
        if symptom == "loss":
            edges = claim.explained & self._found.seen.keys()
            looked, blocked = [self._found.seen[each] for each in edges], self._found.blocked
            # What failed by chance was tried again: those connections count as well.
            tried = sum(len(each.failed) + len(each.passed) + each.lost for each in looked)
            tried -= sum(len(blocked[each]) for each in edges & blocked.keys())
            lost = sum(map(self._found.lost_at_random, edges))
            facts["lost"], facts["tried"] = str(lost), str(tried)
            facts["sent"] = str(sum(each.sent for each in looked))
            facts["resent"] = str(sum(each.resent for each in looked))
        if symptom == "large":
            facts |= self._sizes(claim)
        if symptom == "bandwidth":
            middle_s = statistics.median(self._found.data_s[each] for each in claim.explained)
            facts["mbit"] = f"{_megabits(middle_s):.1f}"
            facts["usual_mbit"] = f"{_megabits(self._usual_s):.0f}"
        if symptom == "slow":
            took = self._found.rtt_ms
            times = [took[each if each in self._slow else each[::-1]] for each in claim.explained]
            facts["ms"] = f"{statistics.median(times):.1f}"
            facts["usual_ms"] = f"{self.usual_ms:.2f}"
        return facts

    def _sizes(self, claim: Claim) -> dict[str, str]:
        either = {edge for src, dst in claim.explained for edge in ((src, dst), (dst, src))}
        found = [seen for edge in either if (seen := self._found.seen.get(edge)) is not None]
        ends_of = Counter((each.passed_mtu, each.beyond_mtu) for each in found if each.beyond_mtu)
        ends = [place for edge in either for each in edge if (place := self._hosts[each].place)]
        facts = {"mtu": str(min(each.mtu for each in ends))} if ends else {}
        if ends_of:
            passes, lost = ends_of.most_common(1)[0][0]
            facts["passes"], facts["lost"] = str(passes), str(lost)
        return facts

    def _ports(self, edges: frozenset[Edge]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ports that failed, and those that passed, lowest to highest, on all of ``edges``."""
        failed, passed = set[int](), set[int]()
        for edge in edges:
            ports, seen = self._hosts[edge[1]].ports, self._found.seen[edge]
            own = self._found.of_ports(edge)
            failed |= {ports[slot] for slot in own if _of("ports", seen.failed[slot])}
            passed |= {ports[slot] for slot in seen.passed}
            passed |= {ports[slot] for slot, how in seen.failed.items() if not _of("ports", how)}
        return tuple(sorted(failed)), tuple(sorted(passed - failed))

    def matrix(self, out: set[int]) -> tuple[str, ...]:
        """One line a host: what became of its edge to each."""
        found, rows = self._found, []
        for src in range(len(self._hosts)):
            row = ""
            for dst in range(len(self._hosts)):
                edge = (src, dst)
                marks = (
                    ("-", src == dst),
                    ("?", bool(out & {src, dst}) or edge in found.unknown),
                    ("x", edge in found.dead),
                    ("m", edge in found.large),
                    ("p", edge in found.ports or edge in found.store_port),
                    ("l", edge in found.loss | found.resending),
                    ("s", edge in self._slow),
                    ("b", edge in self._thin),
                )
                row += next((mark for mark, holds in marks if holds), ".")
            rows.append(row)
        return tuple(rows)


def _beyond(usual: Sequence[float], least: float) -> float:
    """Above this a figure is an outlier among the hosts' medians; never below ``least``."""
    # The lower of the two in the middle: half of the hosts may be outliers.
    middle = statistics.median_low(usual) if usual else 0.0
    spread = 1.4826 * statistics.median_low(abs(each - middle) for each in usual or (0.0,))
    return max(least, _SLOW_RATIO * middle, middle + _SLOW_SPREADS * spread)


def _smaller_ends(claim: Claim) -> Sequence[tuple[int, ...]]:
    """Where the cause of ``claim`` is: one host of it, or each of two."""
    ends = [each for each in (claim.a, claim.b) if len(each) == 1]
    return ends[:1] if claim.shape.startswith("host") else ends


def _megabits(took_s: float) -> float:
    return 8e-6 * wire.DATA_BYTES / max(took_s, 1e-6)


def _of(symptom: Symptom, how: str) -> bool:
    large = how in ("large-out", "large-in")
    return large if symptom == "large" else not large


def _groups(hosts: Sequence[Facts], live: Sequence[int]) -> dict[str, dict[str, list[int]]]:
    """Hosts by what configuration gives them in common."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    nets = Counter(str(subnet(place)) for n in live if (place := hosts[n].place))
    for number in live:
        place = hosts[number].place
        if place is None:
            continue
        own = str(subnet(place))
        ways = [net for a in hosts[number].addresses if (net := str(subnet(a))) in nets]
        if nets[own] < 2:  # what it opens leaves by a network where others listen
            own = next((net for net in ways if net != own), own)
        groups["subnet"][own].append(number)
        groups["interface"][place.interface].append(number)
        groups["MTU"][str(place.mtu)].append(number)
        groups["family"][f"IPv{place.family}"].append(number)
    return {by: dict(named) for by, named in groups.items() if len(named) > 1}
