"""What nodes put into the job's store beside the log: one type for each value, one codec.

Nodes with different versions of ncclops are refused, and each has to read of the other that it is
such a one: what cannot be read comes from another version.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ncclops.classify.policy import PastAttempt
from ncclops.cluster.fingerprint import Fingerprint


class JobSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the job, as ``--nnodes`` has it, and the first node that has named it."""

    nnodes: str
    name: str


class RankClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a node that has taken a rank of a round; ``at`` in seconds since the epoch."""

    name: str
    pid: int
    at: float


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What node 0 has to know of each node. ``attempt`` is the one that the node would start;
    ``hosts``: it hosts the job's store. ``clock_offset_s`` is against node 0, which adds it.
    """

    name: str
    address: str
    attempt: int
    hosts: bool
    history: list[PastAttempt]
    print: Fingerprint
    clock_offset_s: float = 0.0


Value = TypeVar("Value", JobSize, RankClaim, NodeFacts)


def encode(value: JobSize | RankClaim | NodeFacts) -> str:
    """One JSON object."""
    return msgspec.json.encode(value).decode()


def decode(data: bytes, kind: type[Value]) -> Value | None:
    """The inverse of ``encode``; None for what another version has written."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError):  # of msgspec and of Unicode
        return None
