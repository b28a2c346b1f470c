"""An all_reduce over the GPUs of two nodes, one pair of nodes beside the other.

After the edges are checked: hosts 0 and 1, 2 and 3, and so on, as far as both have GPUs to offer
and nothing speaks against either. The first of a pair serves the store, on a port that its listener
for the edges had and has given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ncclops.host import interfaces
from ncclops.host.gpus import find_gpus
from ncclops.preflight.catalogue import catalogue
from ncclops.preflight.checks.collective import pair as judge_pair
from ncclops.preflight.edges.model import Facts, Verdict
from ncclops.preflight.machine import collective
from ncclops.preflight.model import Finding, NodeReport, Status
from ncclops.preflight.readings import Node
from ncclops.profiles.model import PreflightNeeds


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
    here = [
        number
        for number, host in enumerate(verdict.hosts)
        if host.place is not None and host.place.address == address
    ]
    if len(here) != 1:
        return None
    number = here[0]
    other = number ^ 1
    if other >= len(verdict.hosts) or verdict.failed:
        return None
    one, two = verdict.hosts[number & ~1], verdict.hosts[number | 1]
    if not _offers(one) or one.gpus != two.gpus or not _offers(two) or one.place is None:
        return None
    return Pair(
        first=number < other,
        peer=verdict.hosts[other].name,
        gpus=one.gpus,
        address=one.place.address,
        port=one.ports[-1],
    )


def measured(
    report: NodeReport, verdict: Verdict, environ: Mapping[str, str], needs: PreflightNeeds
) -> NodeReport:
    """``report`` with what an all_reduce with this host's partner has come to, if it has one.

    Takes up to two minutes; starts processes, and leaves none. Any thread.
    """
    own = (each.place.address for each in verdict.hosts if each.place is not None)
    here = next((address for address in own if interfaces.is_here(address)), "")
    pair = find(verdict, here)
    if pair is None:
        return report
    found = collective.measure_pair(pair.gpus, environ, pair)
    node = Node(pair=msgspec.structs.replace(found, peer=pair.peer), needs=needs)
    findings: tuple[Finding, ...] = tuple(judge_pair(catalogue()["gpu.pair"], node))
    return msgspec.structs.replace(report, findings=(*report.findings, *findings))


def gpus_of(report: NodeReport) -> int:
    """How many GPUs this node offers: all, if its own all_reduce over them ended well, else 0."""
    well = any(each.check == "gpu.all-reduce" for each in report.of(Status.OK))
    return find_gpus().count if well else 0


def _offers(host: Facts) -> bool:
    return host.gpus > 0 and bool(host.ports) and all(e.status != "FAIL" for e in host.findings)
