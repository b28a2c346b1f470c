"""A collective of two nodes, one pair of nodes beside the other: over NCCL between their GPUs, over
Gloo where they have none.

After the edges are checked, in the same meeting: all hosts compute the same pairs
(``edges.collectives``), the first of a pair serves the store, on a port that its listener for the
edges had and has given back. Then all tell each other what came of it, round by round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from ncclops.errors import PreflightRefused
from ncclops.host.gpus import find_gpus
from ncclops.preflight.catalogue import catalogue
from ncclops.preflight.checks.collective import bus_bandwidth, fault, figure
from ncclops.preflight.edges import collectives
from ncclops.preflight.edges.meeting import Meeting
from ncclops.preflight.edges.model import Offer, PairsTried, PairTried, Place, Verdict
from ncclops.preflight.machine import collective
from ncclops.preflight.model import NodeReport, Status
from ncclops.profiles.model import PreflightNeeds

# Beyond the limit of a collective: for hosts that have begun later, and for their answers.
_SLACK_S = 30.0
_ROUND_S = collective.LIMIT.total_seconds() + _SLACK_S
MOST_S = collectives.ROUNDS * (_ROUND_S + _SLACK_S)
"""All rounds take no longer."""

Measure = Callable[["Pair"], PairTried]


@dataclass(frozen=True)
class Pair:
    """This host's part in one. ``first``: it serves the store, at ``address`` and ``port``.
    ``place`` is where NCCL would listen here."""

    a: int
    b: int
    first: bool
    offer: Offer
    address: str
    port: int
    place: Place


def offer(report: NodeReport, environ: Mapping[str, str], needs: PreflightNeeds) -> Offer | None:
    """What this node offers for a collective with another: all its GPUs if its own all_reduce over
    them ended well, or if it has one only; without GPUs a process. Else None."""
    own = [each for each in report.findings if each.check == "gpu.all-reduce"]
    if not own:
        has_none = not any(each.check.startswith("gpu.") for each in report.findings)
        return Offer(backend="gloo", ranks=1) if has_none else None
    if not any(each.status is Status.OK or each.read == collective.ONE_GPU for each in own):
        return None
    names = find_gpus(environ).names
    if not names:
        return None
    model = names[0] if len({*names}) == 1 else ""
    lane = (needs.rdma_ports or 0) * (needs.rdma_gbps or 0) / 8
    check = catalogue()["gpu.bandwidth"]
    least = lane * check.limit("lane_share") or figure(check.limits["pairs"], model, len(names))
    return Offer(backend="nccl", ranks=len(names), model=model, least_gbps=least or 0.0)


@dataclass(frozen=True)
class Pairs:
    """Collectives of two hosts, after the check of the edges (``edges.run.Then``).

    ``measure`` blocks, no longer than the limit of a collective; ``note`` is told how far it is.
    """

    measure: Measure
    note: Callable[[str], None] = lambda _: None
    most_s: float = MOST_S

    async def __call__(
        self, meeting: Meeting, verdict: Verdict, me: int, arrivals: Mapping[int, int]
    ) -> Verdict:
        """``verdict`` with what they come to; the same on all hosts."""
        tried: list[PairTried] = []
        for number in range(collectives.ROUNDS):
            pairs = collectives.next_round(verdict, tried)
            if not pairs:
                break
            self.note(f"collectives of two hosts, round {number + 1}: {len(pairs)}")
            deadline = time.monotonic() + _ROUND_S
            own = next((_part(verdict, pair, me, number) for pair in pairs if me in pair), None)
            try:
                if own is not None:
                    found = await asyncio.to_thread(self.measure, own)
                    await meeting.say(f"pair-{number}", found)
                tried += await _all(meeting, number, pairs, arrivals, deadline)
            except PreflightRefused as error:
                self.note(f"collectives of two hosts: {error}")
                break
        return collectives.with_pairs(verdict, tried) if tried else verdict


async def _all(
    meeting: Meeting,
    number: int,
    pairs: tuple[collectives.Pair, ...],
    arrivals: Mapping[int, int],
    deadline: float,
) -> tuple[PairTried, ...]:
    """What all hosts have found. Raises ``PreflightRefused`` where they do not meet in time.

    Whoever gathers answers by ``deadline``, however long a host that has died is waited for: the
    others wait longer.
    """
    topic = f"pairs-{number}"
    if not meeting.gathers:
        return (await meeting.hear(topic, PairsTried, _ROUND_S + _SLACK_S)).tried
    hosts = {host: arrivals[host] for pair in pairs for host in pair if host in arrivals}
    left_s = max(1.0, deadline - time.monotonic())
    found = await meeting.gather(f"pair-{number}", PairTried, hosts.values(), left_s)
    by_host = {host: found[arrival] for host, arrival in hosts.items() if arrival in found}
    settled = PairsTried(tried=tuple(_settled(pair, by_host) for pair in pairs))
    await meeting.answer(topic, settled)
    return settled.tried


def _settled(pair: collectives.Pair, by_host: Mapping[int, PairTried]) -> PairTried:
    """What both hosts of ``pair`` say, in one: it failed where either says so."""
    said = [by_host[host] for host in pair if host in by_host]
    wells = {each.well for each in said}
    if False in wells:
        failed = [each.says for each in said if each.well is False]
        # What the other has heard of it is less than what the rank itself says.
        words = min(failed, key=lambda each: collective.ELSEWHERE in each)
        return PairTried(a=pair[0], b=pair[1], well=False, says=words)
    if len(said) == 2 and wells == {True}:
        return PairTried(a=pair[0], b=pair[1], well=True, gbps=min(e.gbps for e in said))
    words = next((each.says for each in said if each.says), "no word came from one of them")
    return PairTried(a=pair[0], b=pair[1], says=words)


def _part(verdict: Verdict, pair: collectives.Pair, me: int, number: int) -> Pair:
    hosts = [verdict.hosts[each] for each in pair]
    own, place, given = verdict.hosts[me].place, hosts[0].place, hosts[0].offer
    assert own is not None  # see collectives.next_round
    assert place is not None
    assert given is not None
    return Pair(
        a=pair[0],
        b=pair[1],
        first=me == pair[0],
        offer=given,
        address=place.address,
        port=hosts[0].ports[-1 - number],
        place=own,
    )


def measure(environ: Mapping[str, str]) -> Measure:
    """How a pair is measured here: in processes of their own, with ``environ``."""

    def measured(pair: Pair) -> PairTried:
        given = dict(environ)
        if pair.offer.backend == "gloo":
            given.setdefault("GLOO_SOCKET_IFNAME", pair.place.interface.partition(":")[0])
        found = collective.measure_pair(pair.offer.ranks, given, pair, pair.offer.backend)
        tried = PairTried(a=pair.a, b=pair.b)
        if found.unknown:
            return msgspec.structs.replace(tried, says=found.unknown)
        if (why := fault(found)) is not None:
            return msgspec.structs.replace(tried, well=False, says=why)
        is_gloo = pair.offer.backend == "gloo"
        gbps = 0.0 if is_gloo else bus_bandwidth(found.bytes, found.seconds, found.gpus)
        return msgspec.structs.replace(tried, well=True, gbps=round(gbps, 2))

    return measured
