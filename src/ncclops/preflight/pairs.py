"""An all_reduce over the GPUs of two nodes, one pair of nodes beside the other.

After the edges are checked: hosts 0 and 1, 2 and 3, and so on, as far as both have GPUs to offer
and nothing speaks against either. The first of a pair serves the store, on a port that its listener
for the edges had and has given back. Then all hosts tell each other what came of it, and each host
of a pair that failed tries again with one of a pair that did not: which of the two it was.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from ncclops.errors import PreflightRefused
from ncclops.host import interfaces
from ncclops.host.gpus import find_gpus
from ncclops.preflight.catalogue import catalogue
from ncclops.preflight.checks.collective import pair as judge_pair
from ncclops.preflight.edges.meeting import Meeting, Where
from ncclops.preflight.edges.model import Facts, PairsTried, PairTried, Verdict
from ncclops.preflight.machine import collective
from ncclops.preflight.model import Finding, NodeReport, Status
from ncclops.preflight.readings import Node
from ncclops.profiles.model import PreflightNeeds

# Beyond the limit of the collective itself: for hosts that have begun later.
_WITHIN_S = collective.LIMIT.total_seconds() + 60.0


@dataclass(frozen=True)
class Pair:
    """This host's. ``first``: it serves the store, at ``address`` and ``port``."""

    first: bool
    peer: str
    gpus: int
    address: str
    port: int


def find(verdict: Verdict, address: str) -> Pair | None:
    """The pair of the host whose edges are tried at ``address``; None where it has no partner."""
    number = number_of(verdict, address)
    return None if number is None else _pair(verdict, number, number ^ 1, port=-1)


def number_of(verdict: Verdict, address: str) -> int | None:
    """The place of the host whose edges are tried at ``address``, among those of ``verdict``."""
    here = [
        number
        for number, host in enumerate(verdict.hosts)
        if host.place is not None and host.place.address == address
    ]
    return here[0] if len(here) == 1 else None


def second(verdict: Verdict, tried: PairsTried, number: int) -> Pair | None:
    """The pair of host ``number`` in the second round: a suspect and a good one; None for others.

    Both hosts of a pair that failed for either are suspects. There may be more of them than of the
    good ones: those then stay suspects.
    """
    bad = {each for each, well in tried.well.items() if not well}
    bad |= {each ^ 1 for each in bad}
    good = [each for each in sorted(tried.well) if each not in bad]
    for suspect, other in zip(sorted(bad), good, strict=False):
        if number in (suspect, other):
            return _pair(verdict, number, other if number == suspect else suspect, port=-2)
    return None


def _pair(verdict: Verdict, number: int, other: int, *, port: int) -> Pair | None:
    if max(number, other) >= len(verdict.hosts) or verdict.failed:
        return None
    one, two = verdict.hosts[min(number, other)], verdict.hosts[max(number, other)]
    if not _offers(one) or one.gpus != two.gpus or not _offers(two) or one.place is None:
        return None
    return Pair(
        first=number < other,
        peer=verdict.hosts[other].name,
        gpus=one.gpus,
        address=one.place.address,
        port=one.ports[port],
    )


@dataclass(frozen=True)
class Measured:
    """``report`` with what the pairs have come to; whether they convict this host itself."""

    report: NodeReport
    convicted: bool = False


def measured(
    report: NodeReport,
    verdict: Verdict,
    environ: Mapping[str, str],
    needs: PreflightNeeds,
    where: Where,
    note: Callable[[str], None] = lambda _: None,
) -> Measured:
    """What an all_reduce with this host's partner has come to, if it has one; and in a second round
    with a good host, if that failed.

    All hosts of ``verdict`` have to call this; they meet at ``where`` once more. Takes up to five
    minutes; starts processes, and leaves none. Any thread.
    """
    own = (each.place.address for each in verdict.hosts if each.place is not None)
    here = next((address for address in own if interfaces.is_here(address)), "")
    number = number_of(verdict, here)
    if number is None or not any_pair(verdict):
        return Measured(report)

    def try_with(pair: Pair | None) -> Finding | None:
        if pair is None:
            return None
        found = collective.measure_pair(pair.gpus, environ, pair)
        node = Node(pair=msgspec.structs.replace(found, peer=pair.peer), needs=needs)
        return next(iter(judge_pair(catalogue()["gpu.pair"], node)), None)

    async def tell(own: PairTried) -> PairsTried:
        return await _tell(where, len(verdict.hosts), own)

    findings, convicted = asyncio.run(both_rounds(verdict, number, try_with, tell, note))
    report = msgspec.structs.replace(report, findings=(*report.findings, *findings))
    return Measured(report, convicted)


def any_pair(verdict: Verdict) -> bool:
    """Whether there is anything to try; the same on every host."""
    return any(_pair(verdict, n, n ^ 1, port=-1) for n in range(0, len(verdict.hosts), 2))


async def both_rounds(
    verdict: Verdict,
    number: int,
    try_with: Callable[[Pair | None], Finding | None],
    tell: Callable[[PairTried], Awaitable[PairsTried]],
    note: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[Finding, ...], bool]:
    """What host ``number`` finds, and whether it is convicted: it failed with two hosts, of which
    the second had done well. ``try_with`` blocks; ``tell`` takes what this one has found, and gives
    what all have."""
    own = await asyncio.to_thread(try_with, _pair(verdict, number, number ^ 1, port=-1))
    findings = (own,) if own else ()
    well = None if own is None or own.status is Status.CANNOT_TELL else own.status != Status.FAIL
    try:
        tried = await tell(PairTried(number=number, well=well))
    except PreflightRefused as error:
        note(f"pairs are not tried again: {error}")
        return findings, False
    pair = second(verdict, tried, number)
    again = await asyncio.to_thread(try_with, pair)
    if pair is None or again is None:
        return findings, False
    if well:  # this one is the good one, and says nothing of the other: that does so itself
        return findings, False
    failed = again.status is Status.FAIL
    words = f"{again.read}; it is this host: {pair.peer} did well with another" if failed else ""
    return (*findings, msgspec.structs.replace(again, read=words or again.read)), failed


async def _tell(where: Where, count: int, own: PairTried) -> PairsTried:
    """What all hosts have found. Raises ``PreflightRefused`` where they do not meet in time."""
    met = replace(where, job_id=f"{where.job_id}/pairs", count=count, least=count)
    meeting = await Meeting.join(met, _WITHIN_S)
    async with contextlib.aclosing(meeting):
        await meeting.say("pair", own)
        if not meeting.gathers:
            return await meeting.hear("pairs", PairsTried, 2 * _WITHIN_S)
        found = await meeting.gather("pair", PairTried, range(count), _WITHIN_S)
        tried = {each.number: each.well for each in found.values() if each.well is not None}
        pairs = PairsTried(well=tried)
        await meeting.answer("pairs", pairs)
        return pairs


def gpus_of(report: NodeReport) -> int:
    """How many GPUs this node offers: all, if its own all_reduce over them ended well, else 0."""
    well = any(each.check == "gpu.all-reduce" for each in report.of(Status.OK))
    return find_gpus().count if well else 0


def _offers(host: Facts) -> bool:
    return host.gpus > 0 and bool(host.ports) and all(e.status != "FAIL" for e in host.findings)
