"""Where an attempt runs: this node's part of the job, and the store its workers share."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from ncclops.agent.hosted_store import StoreAddress
from ncclops.agent.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Place:
    """``number`` counts the attempts of the job from 0. ``store`` is where its workers meet;
    ``listener`` is that store's socket where this node hosts it, to be served or closed.
    ``environ`` is what the workers have to know beyond their identity. An ``idle`` node is in
    reserve and starts none; the workers of a ``spare`` one wait until others are lost."""

    number: int
    layout: Layout
    store: StoreAddress
    listener: socket.socket | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    idle: bool = False
    spare: bool = False

    @property
    def ranks(self) -> list[int]:
        """The ranks of this node, by local rank; none on an idle one."""
        count = 0 if self.idle else self.layout.nproc
        return [self.layout.rank(local) for local in range(count)]
