"""Whether the ranks of this node use the network that the job was meant for.

``NetworkLines`` finds NCCL's lines in the output as it is read, in the thread that reads it;
``NetworkWatch`` tells of them, in the event loop, and of what workers have open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ncclops.agent.coordinator import Coordinator
from ncclops.agent.job import Job
from ncclops.errors import NetworkRefused
from ncclops.health.network import MARKS, NetworkReading, NetworkSeen, meets, shown_by
from ncclops.record.event_values import NetworkUse
from ncclops.record.events import NetworkEvent, NetworkOpenEvent

_LONGEST = 4096  # NCCL's own lines are shorter
_SAYS_IT_WITHIN_S = 3.0  # before its first collective; what ranks print is read behind that


class NetworkLines:
    """The lines in which NCCL names its network, in output that comes in blocks. One thread."""

    def __init__(self, on_seen: Callable[[int, NetworkSeen], None]) -> None:
        self._on_seen = on_seen
        self._partial: dict[Path, bytes] = {}
        self._readings: dict[int, NetworkReading] = {}

    def feed(self, rank: int, path: Path, data: bytes) -> None:
        """``path`` of ``rank`` has grown by ``data``."""
        data = self._partial.pop(path, b"") + data
        whole, _, rest = data.rpartition(b"\n")
        if len(rest) <= _LONGEST:
            self._partial[path] = rest
        if b"NCCL " not in whole or not any(mark in whole for mark in MARKS):
            return
        reading = self._readings.setdefault(rank, NetworkReading())
        for line in whole.split(b"\n"):
            if b"NCCL " in line and any(mark in line for mark in MARKS):
                seen = reading.feed(line[:_LONGEST].decode(errors="replace"))
                if seen is not None:
                    self._on_seen(rank, seen)


class NetworkWatch:
    """What ranks of this node say of their network: recorded, told, and refused if need be.

    ``use`` is that of the node: the first rank's, until one has another that was not meant.
    ``refuse`` is called once, with why the job is not to go on. To be made in the event loop.
    """

    def __init__(
        self,
        job: Job,
        coordinator: Coordinator,
        say: Callable[[str], None],
        refuse: Callable[[NetworkRefused], None],
    ) -> None:
        self._job, self._coordinator = job, coordinator
        self._say, self._refuse = say, refuse
        self._loop = asyncio.get_running_loop()
        self.use: NetworkUse | None = None
        self._shown: tuple[int, NetworkSeen] | None = None

    def from_thread(self, rank: int, seen: NetworkSeen) -> None:
        """``on_seen``, from another thread."""
        with suppress(RuntimeError):  # the run is over meanwhile
            self._loop.call_soon_threadsafe(self.on_seen, rank, seen)

    def on_open(self, rank: int, event: NetworkOpenEvent) -> None:
        """What ``rank`` has open and loaded. Judged where NCCL itself says nothing."""
        seen = shown_by(event.rdma_devices, event.plugins)
        if seen is not None and self._shown is None and self._job.network.expected:
            self._shown = rank, seen
            self._loop.call_later(_SAYS_IT_WITHIN_S, self.finish)

    def finish(self) -> None:
        """The output has been read, or NCCL would have said it by now."""
        if self._shown is not None and self.use is None:
            self.on_seen(*self._shown)

    def on_seen(self, rank: int, seen: NetworkSeen) -> None:
        """``rank`` uses this network. Ranks that use the same as one before add nothing."""
        wanted = self._job.network.expected
        use = NetworkUse(
            node=self._job.run.node,
            rank=rank,
            name=seen.name,
            kinds=list(seen.kinds),
            devices=list(seen.devices),
            interface=seen.interface,
            expected=list(wanted),
            met=meets(seen, wanted) if wanted else None,
            reason="; ".join(seen.reasons) or None,
        )
        before = self.use
        if before is not None and (before.name == use.name or before.met is False):
            return
        if before is None or use.met is False:
            self.use = use
        self._job.run.add(NetworkEvent(rank=rank, use=use))
        if use.met is not False:
            return
        if not self._job.network.required:
            self._say(f"rank {rank}: {use}")
            return
        refusal = NetworkRefused(f"{NetworkRefused.option}: {use}")
        self._coordinator.share_refusal(rank, str(refusal))
        self._refuse(refusal)
