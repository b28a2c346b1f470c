"""The start of a round: what node 0 decides from the facts of all nodes, and what follows. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ncclops.agent.hosted_store import StoreAddress
from ncclops.cluster import fingerprint
from ncclops.cluster.node_info import NodeInfo
from ncclops.cluster.records import StartRecord
from ncclops.cluster.rendezvous_config import RendezvousConfig
from ncclops.cluster.store_values import NodeFacts
from ncclops.record.event_values import NodeEntry
from ncclops.record.variables import ACTIVE_RANKS, NODES, STORE_PREFIX


def compare_hosts(gathered: Sequence[NodeFacts], node_info: NodeInfo) -> fingerprint.Comparison:
    """What differs between the nodes whose facts these are."""
    prints = [replace(facts.print, clock_offset_s=facts.clock_offset_s) for facts in gathered]
    return fingerprint.compare(
        prints, allowed=node_info.allowed, lost_after=node_info.rendezvous.pace.lost_after
    )


def start_record(
    gathered: Sequence[NodeFacts],
    job_id: str,
    address: StoreAddress,
    *,
    external: bool,
    remarks: Sequence[str] = (),
) -> StartRecord:
    """The start of a round of these nodes. ``address`` is the workers' store; ``external``: no node
    of the job hosts it; ``remarks`` are lines about differences between the nodes."""
    return StartRecord(
        names=[facts.name for facts in gathered],
        addresses=[facts.address for facts in gathered],
        # Those who came later count with those who were there.
        attempt=max(facts.attempt for facts in gathered),
        history=max((facts.history for facts in gathered), key=len),
        store=(address.host, address.port),
        external=external,
        prefix=f"ncclops/{job_id}/{secrets.token_hex(4)}",
        remarks=list(remarks),
    )


def workers_environ(
    start: StartRecord, rendezvous: RendezvousConfig, *, in_process: bool, nproc: int
) -> Mapping[str, str]:
    """What workers have to know beyond their identity: the nodes, and for restarts in place the
    restart core's store, and spares."""
    environ = {NODES: " ".join(start.names)}
    if not in_process:
        return environ
    environ[STORE_PREFIX] = f"{start.prefix}/{start.attempt}"
    if start.external:
        environ["NCCLOPS_STORE"] = "{}:{}".format(*start.store)
    if rendezvous.local_addr:
        environ["NCCLOPS_RESTART_HOST"] = rendezvous.local_addr
    if len(start.names) > rendezvous.active:
        environ[ACTIVE_RANKS] = str(rendezvous.active * nproc)
    return environ


def nodes_of(start: StartRecord, active: int) -> list[NodeEntry]:
    """The nodes by rank, for the record of the run."""
    pairs = zip(start.names, start.addresses, strict=True)
    return [
        NodeEntry(rank=rank, name=name, address=address, spare=rank >= active)
        for rank, (name, address) in enumerate(pairs)
    ]


def describe_round(start: StartRecord, rank: int, active: int) -> str:
    """Which nodes take part, in a line."""
    names = start.names
    spare = f", in reserve: {' '.join(names[active:])}" if names[active:] else ""
    return f"node {rank} of {len(names)}: {' '.join(names[:active])}{spare}"


def describe_missing(
    rendezvous: RendezvousConfig, here: Sequence[str], begun: bool, first: str
) -> str:
    """Which nodes are there and which are missing, before ranks are given.

    ``begun``: a round is under way without us. ``first`` is the node that has named the job.
    """
    present = f"{len(here)}/{rendezvous.active} nodes: {' '.join(here)}"
    if begun and len(here) >= rendezvous.active:  # fewer: nodes were lost, and any is needed
        return (
            f"{present}; they have begun, and this node waits to be needed"
            f" (job {rendezvous.job_id} of {first}; another job needs its own --rdzv-id)"
        )
    if len(here) >= rendezvous.active:
        return f"{present}; last call for spares"
    missing = [name for name in rendezvous.expected if name not in here]
    return f"{present}; waiting for {' '.join(missing) or rendezvous.active - len(here)}"


def describe_missing_ranks(
    rendezvous: RendezvousConfig, here: Sequence[str], missing: Sequence[int]
) -> str:
    """The same, where each node was given its rank."""
    # A scheduler may list fewer nodes than the command line asks for.
    names = dict(enumerate(rendezvous.expected))
    rest = " ".join(names.get(rank, f"node {rank}") for rank in missing)
    size = len(here) + len(missing)
    return f"{len(here)}/{size} nodes: {' '.join(here)}; waiting for {rest}"
