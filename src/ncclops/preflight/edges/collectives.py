"""Which two hosts run a collective together, round by round, and what follows from it; pure.

As with edges: in the first round neighbours, all pairs beside each other. One pair cannot tell
which of its hosts it was, so each of a pair that fails tries again, with a host that has done well
with another. Every host computes the same from the same results.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ncclops.preflight.edges.explain import MOST_EDGES
from ncclops.preflight.edges.model import Cause, Facts, PairTried, Severity, Verdict

ROUNDS = 3
# Of pairs that offer the same, one with less than this part of the usual bandwidth is slow, if
# there are so many.
_SLOW_SHARE, _LEAST_PAIRS = 0.5, 3
_WITNESSES = 2
_SAID = 300

Pair = tuple[int, int]


def next_round(verdict: Verdict, tried: Sequence[PairTried]) -> tuple[Pair, ...]:
    """The pairs of the next round, after ``tried``: (0, 1), (2, 3), … by the hosts' numbers in the
    first one. Empty where nothing is left to be tried."""
    made: list[Pair] = []
    for hosts in _alike(verdict):
        if not tried:
            made += zip(hosts[::2], hosts[1::2], strict=False)
        else:
            made += _again(hosts, _Look(verdict, tried))
    return tuple(sorted(made))


def with_pairs(verdict: Verdict, tried: Sequence[PairTried]) -> Verdict:
    """``verdict`` with what ``tried`` says, and the causes of it."""
    causes = [*verdict.causes, *_causes(verdict, tried)]
    order = {"FAIL": 0, "WARN": 1, "CANNOT-TELL": 2}
    causes.sort(key=lambda each: order[each.severity])
    return msgspec.structs.replace(verdict, causes=tuple(causes), pairs=tuple(tried))


class _Look:
    """What ``tried`` says of hosts. A pair that failed, or that is slow, is bad."""

    def __init__(self, verdict: Verdict, tried: Sequence[PairTried]) -> None:
        self.failed = {(each.a, each.b) for each in tried if each.well is False}
        self.slow = _slow(verdict, tried)
        ended = {(each.a, each.b) for each in tried if each.well}
        self.ended = {host for pair in ended for host in pair}
        self.fast = {host for pair in ended - self.slow for host in pair}
        self.partners: dict[int, set[int]] = defaultdict(set)
        for each in tried:
            self.partners[each.a].add(each.b)
            self.partners[each.b].add(each.a)


def _alike(verdict: Verdict) -> list[list[int]]:
    """The hosts that can run one together: they offer the same, and nothing speaks against them."""
    accused = {
        host
        for cause in verdict.causes
        if cause.severity == "FAIL"
        for host in (*cause.a, *cause.b, *cause.hosts)
    }
    groups: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for number, host in enumerate(verdict.hosts):
        if host.offer is not None and number not in accused and _is_able(host):
            offer = host.offer
            groups[offer.backend, offer.ranks, offer.model].append(number)
    return list(groups.values())


def _is_able(host: Facts) -> bool:
    found_bad = any(each.status == "FAIL" for each in host.findings)
    # One of its ports is the store's in each round.
    return host.place is not None and len(host.ports) > ROUNDS and not found_bad


def _again(hosts: Sequence[int], look: _Look) -> list[Pair]:
    """Each host of which nothing good is known, with one that has done well; where none has, with
    another of its kind that it has not met."""
    good = look.fast & {*hosts}
    pairs = {pair for pair in look.failed | look.slow if {*pair} <= {*hosts}}
    if not good and pairs and not any(pair in look.failed for pair in pairs):
        return []  # all are slow: it is none of them
    wanted = [host for host in hosts if host not in good and not _is_known(host, look)]
    free, made = [host for host in hosts if host in good], list[Pair]()
    while wanted:
        host, *wanted = wanted
        others = free if good else wanted
        other = next((each for each in others if each not in look.partners[host]), None)
        if other is not None:
            others.remove(other)
            made.append((min(host, other), max(host, other)))
    return made


def _is_known(host: int, look: _Look) -> bool:
    return any(_convicts(host, bad, good) for bad, good in _kinds(look))


def _kinds(look: _Look) -> tuple[tuple[set[Pair], set[int]], ...]:
    return (look.failed, look.ended), (look.slow, look.fast)


def _convicts(host: int, bad: set[Pair], good: set[int]) -> bool:
    """Whether ``bad`` pairs are due to ``host``: with two others, one of which has done well with
    another, and well with nobody."""
    others = {each for pair in bad if host in pair for each in pair} - {host}
    return host not in good and len(others) >= _WITNESSES and bool(others & good)


def _slow(verdict: Verdict, tried: Sequence[PairTried]) -> set[Pair]:
    """The pairs with little bandwidth: below what their hosts want, or half of what is usual."""
    by_offer: dict[tuple[str, int, str], list[PairTried]] = defaultdict(list)
    for each in tried:
        offer = verdict.hosts[each.a].offer
        if each.well and each.gbps > 0 and offer is not None:
            by_offer[offer.backend, offer.ranks, offer.model].append(each)
    found = set[Pair]()
    for pairs in by_offer.values():
        usual = statistics.median(each.gbps for each in pairs)
        for each in pairs:
            wanted = (verdict.hosts[n].offer for n in (each.a, each.b))
            least = min(offer.least_gbps for offer in wanted if offer is not None)
            if len(pairs) >= _LEAST_PAIRS:
                least = max(least, _SLOW_SHARE * usual)
            if each.gbps < least:
                found.add((each.a, each.b))
    return found


def _causes(verdict: Verdict, tried: Sequence[PairTried]) -> Iterable[Cause]:
    look = _Look(verdict, tried)
    told = {(each.a, each.b): each for each in tried}
    yield from _explained("collective", "FAIL", look.failed, look.ended, told, verdict)
    yield from _explained("collective-bandwidth", "WARN", look.slow, look.fast, told, verdict)
    unknown = [each for each in tried if each.well is None]
    if unknown:
        ends = {host for each in unknown for host in (each.a, each.b)}
        yield _cause(
            "collective", "CANNOT-TELL", tuple(sorted(ends)), (), unknown, verdict.hosts, hosts=()
        )


def _explained(
    kind: str,
    severity: Severity,
    bad: set[Pair],
    good: set[int],
    told: dict[Pair, PairTried],
    verdict: Verdict,
) -> Iterable[Cause]:
    """A cause for each host that is to blame; of what is left, one for each pair; one for all where
    no host has done well with any other."""

    def of(is_meant: Callable[[Pair], bool]) -> list[PairTried]:
        return [each for pair, each in told.items() if pair in bad and is_meant(pair)]

    ends = sorted({host for pair in bad for host in pair})
    guilty = [host for host in ends if _convicts(host, bad, good)]
    for host in guilty:
        pairs = of(lambda pair, host=host: host in pair)  # type: ignore[misc]
        hosts = (host,) if severity == "FAIL" else ()
        yield _cause(kind, severity, (host,), (), pairs, verdict.hosts, hosts=hosts)
    rest = of(lambda pair: not {*pair} & {*guilty})
    left = tuple(sorted({host for each in rest for host in (each.a, each.b)}))
    if len(rest) > MOST_EDGES or (len(rest) > 1 and not good):
        yield _cause(kind, severity, left, left, rest, verdict.hosts, hosts=())
        return
    for each in rest:
        yield _cause(kind, severity, (each.a,), (each.b,), [each], verdict.hosts, hosts=())


def _cause(
    kind: str,
    severity: Severity,
    a: tuple[int, ...],
    b: tuple[int, ...],
    pairs: Sequence[PairTried],
    facts: Sequence[Facts],
    *,
    hosts: tuple[int, ...],
) -> Cause:
    offer = facts[pairs[0].a].offer
    assert offer is not None  # the pair could not have been tried
    found = {"backend": offer.backend, "ranks": str(2 * offer.ranks), "says": _said(pairs)}
    if kind == "collective-bandwidth":
        least = min(each.least_gbps for n in (*a, *b) if (each := facts[n].offer) is not None)
        found |= {"gbps": f"{min(each.gbps for each in pairs):.3g}", "least": f"{least:.3g}"}
    return Cause(
        kind=kind,
        severity=severity,
        shape="host" if not b and len(a) == 1 else "pair" if len(a) == len(b) == 1 else "several",
        symptom="collective",
        a=a,
        b=b,
        both_ways=True,
        edges=len(pairs),
        hosts=hosts,
        facts={name: value for name, value in found.items() if value},
    )


def _said(pairs: Sequence[PairTried]) -> str:
    words = dict.fromkeys(each.says for each in pairs if each.says)
    return "; ".join(words)[:_SAID]
