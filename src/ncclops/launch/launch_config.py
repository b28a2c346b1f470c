"""Where this node is in the job: by the options, else by what a scheduler says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from ncclops.cluster.rendezvous_config import RendezvousConfig, parse_meeting
from ncclops.errors import UsageError
from ncclops.schedulers.placement import Placement, find_placement

# A store that no node of the job hosts, as ``ncclops store serve`` prints it.
STORE = "NCCLOPS_STORE"


@dataclass(frozen=True, kw_only=True)
class Given:
    """The options that say where a node is, in torchrun's spelling; None where not given."""

    nnodes: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    local_addr: str | None = None
    nproc: str | None = None
    max_restarts: int | None = None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """``rendezvous`` is None for a single node."""

    rendezvous: RendezvousConfig | None
    nproc: str
    max_restarts: int
    remarks: tuple[str, ...]


def place(
    given: Given, *, standalone: bool = False, environ: Mapping[str, str] = os.environ
) -> Placed:
    """Settle it. Raises ``UsageError`` where options, or a scheduler's variables, do not fit."""
    found, asked_for_rank = None if standalone else find_placement(environ), given.node_rank
    if standalone:
        given = replace(given, nnodes="1")
    elif found is not None:
        given = _filled_in(given, found)
    rendezvous = parse_meeting(
        nnodes=given.nnodes,
        node_rank=given.node_rank,
        master_addr=given.master_addr,
        master_port=given.master_port,
        rdzv_backend=given.rdzv_backend,
        rdzv_endpoint=given.rdzv_endpoint,
        rdzv_id=given.rdzv_id,
        rdzv_conf=given.rdzv_conf,
        local_addr=given.local_addr,
        store=environ.get(STORE),
        expected=found.hosts if found else (),
    )
    if rendezvous is None and asked_for_rank and not standalone:
        raise UsageError(
            f"--node-rank {asked_for_rank} of a job of one node: give --nnodes too, the same on all"
        )
    return Placed(
        rendezvous=rendezvous,
        nproc=given.nproc or "auto",
        max_restarts=given.max_restarts or 0,
        remarks=_remarks(found, rendezvous),
    )


def _filled_in(given: Given, found: Placement) -> Given:
    """``given``, and from the scheduler what it leaves open.

    Who names a place to meet has a rendezvous in mind, and the scheduler's own is left out of it.
    """
    own = asdict(found)
    if given.master_addr or given.rdzv_endpoint:
        for name in ("master_addr", "master_port", "rdzv_endpoint", "rdzv_backend"):
            own.pop(name)
        if given.rdzv_backend == "c10d" or (given.rdzv_endpoint and given.node_rank is None):
            given = replace(given, rdzv_backend="c10d")
    missing = {
        name: own[name]
        for name, value in asdict(given).items()
        if value is None and own.get(name) is not None
    }
    return replace(given, **missing)


def _remarks(found: Placement | None, rendezvous: RendezvousConfig | None) -> tuple[str, ...]:
    if found is None:
        return ()
    if rendezvous is None:
        return found.remarks
    rank = "" if rendezvous.rank is None else f", this is node {rendezvous.rank}"
    return (f"{found.source}: {rendezvous.active} nodes{rank}", *found.remarks)
