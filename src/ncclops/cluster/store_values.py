"""What nodes put into the job's store beside the log: one type for each value, one codec.

Nodes with different versions of ncclops are refused, and each has to read of the other that it is
such a one: what cannot be read comes from another version.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, TypeVar

import msgspec

from ncclops.classify.policy import PastAttempt
from ncclops.cluster.fingerprint import Fingerprint


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The node that was first: its launcher's process, when (in seconds since the epoch), its run.

    ``run_dir`` is empty where another version has not said it.
    """

    name: str
    pid: int
    at: Annotated[float, msgspec.Meta(ge=0, le=4e9)]
    run_dir: str = ""

    def __str__(self) -> str:
        run = f", run directory {self.run_dir}" if self.run_dir else ""
        since = datetime.fromtimestamp(self.at).strftime("%Y-%m-%d %H:%M:%S")
        return f"{self.name}: process {self.pid}, since {since}{run}"


class JobClaim(Claim, frozen=True, kw_only=True):
    """The job: its size, as ``--nnodes`` has it, and its script; empty: any."""

    nnodes: str
    script: str = ""


class RankClaim(Claim, frozen=True, kw_only=True):
    """A rank of a round."""


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


Value = TypeVar("Value", JobClaim, RankClaim, NodeFacts)


def encode(value: JobClaim | RankClaim | NodeFacts) -> str:
    """One JSON object."""
    return msgspec.json.encode(value).decode()


def decode(data: bytes, kind: type[Value]) -> Value | None:
    """The inverse of ``encode``; None for what another version has written."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError):  # of msgspec and of Unicode
        return None
