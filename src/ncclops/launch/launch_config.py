"""Where this node is in the job: by the options, else by what a scheduler says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ncclops.cluster.rendezvous_config import RendezvousConfig, parse_rendezvous
from ncclops.errors import UsageError
from ncclops.schedulers.node_options import NodeOptions
from ncclops.schedulers.placement import SchedulerPlacement, find_placement

# A store that no node of the job hosts, as ``ncclops store serve`` prints it.
STORE = "NCCLOPS_STORE"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """``rendezvous`` is None for a single node."""

    rendezvous: RendezvousConfig | None
    nproc: str
    max_restarts: int
    remarks: tuple[str, ...]


def place(
    given: NodeOptions, *, standalone: bool = False, environ: Mapping[str, str] = os.environ
) -> Placed:
    """Settle it. Raises ``UsageError`` where options, or a scheduler's variables, do not fit."""
    found, asked_for_rank = None if standalone else find_placement(environ), given.node_rank
    if standalone:
        if given.nnodes not in (None, "1", "1:1"):
            raise UsageError(f"--standalone is one node: leave it out, or --nnodes {given.nnodes}")
        given = replace(given, nnodes="1")
    elif found is not None:
        given = given.filled_in(found.options)
    rendezvous = parse_rendezvous(
        given, store=environ.get(STORE), expected=found.hosts if found else ()
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


def _remarks(
    found: SchedulerPlacement | None, rendezvous: RendezvousConfig | None
) -> tuple[str, ...]:
    if found is None:
        return ()
    if rendezvous is None:
        return found.remarks
    rank = "" if rendezvous.rank is None else f", this is node {rendezvous.rank}"
    return (f"{found.source}: {rendezvous.active} nodes{rank}", *found.remarks)
