"""What a node brings to a job of several nodes."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ncclops.cluster.fingerprint import Fingerprint
from ncclops.cluster.rendezvous_config import RendezvousConfig

if TYPE_CHECKING:
    from ncclops.preflight.part import NodeCheck


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """What a job of several nodes brings: where to meet, and what this node is like.

    ``script`` is what it runs, by name. ``listener`` is the socket of the job's store, where this
    node hosts it. ``check`` is how ``--preflight`` checks it; None: not at all.
    """

    rendezvous: RendezvousConfig
    name: str
    print: Fingerprint
    allowed: tuple[str, ...]
    script: str
    listener: socket.socket | None
    check: NodeCheck | None = None
