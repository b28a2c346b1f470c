"""What addresses, interfaces and kernels say of edges on which nothing passes; pure."""

from __future__ import annotations

import errno
import ipaddress
import os
from collections import Counter
from collections.abc import Mapping, Sequence

from ncclops.preflight.edges.explain import Claim
from ncclops.preflight.edges.interface import subnet
from ncclops.preflight.edges.model import Facts, Outcome
from ncclops.preflight.edges.states import States

_NO_ROUTE = os.strerror(errno.ENETUNREACH)


class Addresses:
    """Those of ``hosts``, of which ``live`` are judged; ``first`` is what they have reported."""

    def __init__(
        self,
        hosts: Sequence[Facts],
        live: Sequence[int],
        found: States,
        first: Mapping[int, Outcome],
    ) -> None:
        self._hosts, self._live, self._found, self._first = hosts, live, found, first

    def evidence(self, claim: Claim) -> dict[str, str]:
        """Facts that tell why nothing passes on the edges of ``claim``, by name; often none."""
        why = (
            self._other_answers(claim)
            or self._better_interface(claim)
            or self._lacking_interface(claim)
            or self._lacking_family(claim)
        )
        return why | self._ways_out(claim) | self._said(claim)

    def _other_answers(self, claim: Claim) -> dict[str, str]:
        """Whether another machine answers at the address of the host that ``claim`` is about."""
        if claim.shape.startswith("host"):
            targets = set(claim.a)
        elif claim.shape == "group":
            targets = {each[0] for each in (claim.a, claim.b) if len(each) == 1}
        else:
            targets = {*claim.a, *claim.b} if claim.shape in ("edge", "pair") else set()
        for target in sorted(targets):
            host = self._hosts[target]
            place = host.place
            if place is None:
                continue
            whose = {"address": place.address, "whose": host.name}
            into = [edge for edge in claim.explained if edge[1] == target]
            owners = [
                each
                for each in sorted({*self._live} - {target})
                if place.address in {a.address for a in self._hosts[each].addresses}
            ]
            if owners:
                names = ", ".join(self._hosts[each].name for each in owners[:4])
                macs = {mac for each in owners for mac in self._hosts[each].macs}
                return {"other" if host.conflict in macs else "everywhere": names, **whose}
            for edge in into:
                seen = self._found.seen.get(edge)
                if seen is None:
                    continue
                agree = self._first[edge[0]].macs_agree if edge[0] in self._first else 0
                if seen.mac and host.macs and seen.mac not in host.macs and agree:
                    if len(into) < 2 and not host.conflict:  # one host's table: of nobody's address
                        return {"at_mac": seen.mac, "at": self._hosts[edge[0]].name, **whose}
                    return {"their_mac": seen.mac, "mac": place.mac, **whose}
                if seen.other >= 0:
                    return {"other": self._hosts[seen.other].name, **whose}
            if host.conflict:  # this end of an edge that fails
                return {"their_mac": host.conflict, "mac": place.mac, **whose}
        return {}

    def _better_interface(self, claim: Claim) -> dict[str, str]:
        """Whether the hosts of one side listen in a network of their own, and need not."""
        for side in (claim.a, claim.b):
            if not side or claim.shape in ("everything", "several"):
                continue
            others = [each for each in self._live if each not in side]
            nets = Counter(
                str(subnet(place)) for each in others if (place := self._hosts[each].place)
            )
            if not nets:
                continue
            places = [self._hosts[each].place for each in side]
            own = [{str(subnet(a)) for a in self._hosts[each].addresses} for each in side]
            # Of several subnets, the one that these hosts have an address in as well.
            ways = [net for net, _ in nets.most_common() if all(net in each for each in own)]
            usual = ways[0] if ways else nets.most_common(1)[0][0]
            if len(self._live) > 2 and nets[usual] < 2:
                continue
            if any(place is None or str(subnet(place)) in nets for place in places):
                continue
            better = [
                each
                for number in side
                for each in self._hosts[number].addresses
                if str(subnet(each)) == usual
            ]
            if len(better) >= len(side) and places[0] is not None:
                same = better[0].interface == places[0].interface
                if not same and 2 * len(side) > len(self._live):
                    continue  # most hosts have it right: the others lack something
                return {
                    **({"family": str(better[0].family)} if same else {}),
                    "better": better[0].interface,
                    "better_address": better[0].address,
                    "interface": places[0].interface,
                    "address": places[0].address,
                    "rule": self._hosts[side[0]].rule,
                    "subnet": usual,
                    "whose": ", ".join(self._hosts[each].name for each in side),
                }
        return {}

    def _lacking_interface(self, claim: Claim) -> dict[str, str]:
        """Whether one side has no address in the network where all others listen, and they have one
        where it listens, or its kernel knows no way to theirs."""
        if claim.shape not in ("host", "host-out", "group"):
            return {}
        side, others = claim.a, [each for each in self._live if each not in claim.a]
        places = [place for each in others if (place := self._hosts[each].place)]
        own = [place for each in side if (place := self._hosts[each].place)]
        nets = {str(subnet(each)) for each in places}
        if len(others) < 2 or len(nets) != 1 or len(own) < len(side):
            return {}
        wanted = next(iter(nets))
        here = [str(subnet(a)) for each in side for a in self._hosts[each].addresses]
        if wanted in here or {each.interface for each in own} & {p.interface for p in places}:
            return {}
        common = all(
            {str(subnet(a)) for a in self._hosts[each].addresses} & {str(subnet(p)) for p in own}
            for each in others
        )
        seen = [self._found.seen[each] for each in claim.explained if each in self._found.seen]
        if not common and not all(each.says == _NO_ROUTE for each in seen):
            return {}
        return {
            "lacks": wanted,
            "theirs": places[0].interface,
            "own": ", ".join(sorted({each.interface for each in own})),
            **({"common": own[0].interface} if common else {}),
        }

    def _lacking_family(self, claim: Claim) -> dict[str, str]:
        """Whether the host has no address of the family in which all others listen."""
        others = [self._hosts[each] for each in self._live if each not in claim.a]
        families = {each.place.family for each in others if each.place}
        if not claim.shape.startswith("host") or len(families) != 1:
            return {}
        (host,), (family,) = (self._hosts[each] for each in claim.a), families
        own = host.place.family if host.place else family
        if own == family or _has_family(host, family):
            return {}
        common = {"family": str(own)} if all(_has_family(each, own) for each in others) else {}
        return {"family_lacks": str(family), "whose": host.name, **common}

    def _said(self, claim: Claim) -> dict[str, str]:
        """What kernels on the way, and the hosts' own, have answered."""
        words, forbidding, routeless = set[str](), set[str](), set[str]()
        for edge in claim.explained:
            seen, name = self._found.seen.get(edge), self._hosts[edge[0]].name
            if seen is None:
                continue
            words |= {f"{name} is told: {seen.says}"} if seen.says else set()
            routeless |= {name} if seen.says == _NO_ROUTE else set()
            forbidding |= {name} if "forbidden" in seen.failed.values() else set()
        said = {
            "says": "; ".join(sorted(words)[:2]),
            "routeless": ", ".join(sorted(routeless)[:4]),
            "forbidding": ", ".join(sorted(forbidding)[:4]),
        }
        return {name: text for name, text in said.items() if text}

    def _ways_out(self, claim: Claim) -> dict[str, str]:
        """The interface that connections leave by, where that is not the one NCCL listens on."""
        ways: Counter[str] = Counter()
        for src, dst in claim.explained:
            seen, place = self._found.seen.get((src, dst)), self._hosts[src].place
            if seen is None or place is None or not seen.source or seen.source == place.address:
                continue
            named = [a.interface for a in self._hosts[src].addresses if a.address == seen.source]
            if named and named[0] != place.interface:
                ways[f"{self._hosts[src].name} leaves by {named[0]} ({seen.source})"] += 1
        return {"leaves": "; ".join(way for way, _ in ways.most_common(3))} if ways else {}


def _has_family(host: Facts, family: int) -> bool:
    """Whether ``host`` has an address of ``family`` that leads beyond itself and its link."""
    ends = (ipaddress.ip_address(each.address) for each in host.addresses if each.family == family)
    return not all(each.is_loopback or each.is_link_local for each in ends)
