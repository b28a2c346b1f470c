"""Objects within events: what a field holds that is more than a number or a text."""

from __future__ import annotations

import msgspec


class EnvChange(msgspec.Struct, frozen=True, kw_only=True):
    """One variable."""

    name: str
    action: str
    before: str | None = None
    after: str | None = None
    reason: str = ""
    source: str = ""


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A node that takes part."""

    rank: int
    name: str
    address: str = ""
    spare: bool = False


class HangEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one rank in a hang."""

    rank: int
    state: str
    stale: list[str] = []
    window_s: float | None = None
    reason: str = ""


class GpuFault(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that made its rank fail. ``gpu`` is NVML's number, ``device`` its name for people,
    ``what`` the evidence in words.
    """

    rank: int
    node: str
    gpu: int | None = None
    uuid: str | None = None
    pci: str | None = None
    device: str = "GPU"
    what: str = ""

    def __str__(self) -> str:
        return f"{self.device} on node {self.node}: {self.what}; replace node {self.node}"


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that was ``ratio`` times as slow as the median one for ``over_s`` seconds.

    ``gpu`` is NVML's number or UUID, ``cause`` what was seen of it, in words.
    """

    rank: int
    node: str
    ratio: float
    over_s: float = 0.0
    gpu: int | str | None = None
    cause: list[str] = []

    def __str__(self) -> str:
        gpu = f"GPU {self.gpu}: " if self.gpu is not None and self.cause else ""
        return (
            f"rank {self.rank} on {self.node} was slow: {self.ratio:.2f} times the median over"
            f" {self.over_s:.0f} s; {gpu}{', '.join(self.cause) or 'no cause seen'}"
        )


class NetworkUse(msgspec.Struct, frozen=True, kw_only=True):
    """The network that NCCL has chosen on ``node``, as ``rank`` said first.

    ``name`` is NCCL's, ``kinds`` are ib, roce, socket or plugin. ``expected`` is what the job was
    meant for, one of which is enough, and ``met`` whether it is; None where nothing was said.
    """

    node: str
    rank: int
    name: str
    kinds: list[str] = []
    devices: list[str] = []
    interface: str | None = None
    expected: list[str] = []
    met: bool | None = None
    reason: str | None = None

    def __str__(self) -> str:
        devices = f" ({', '.join(self.devices)})" if self.devices else ""
        because = f": {self.reason}" if self.reason else ""
        return (
            f"this job was meant for {' or '.join(self.expected)}, and NCCL uses the network"
            f" {self.name}{devices} on {self.node}{because}"
        )


class RetryAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a failure of this class may be tried again."""

    eligible: bool = False
    policy: str = "none"
    reason: str = ""


class EvidenceLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of output that proves something."""

    file: str
    line: int
    text: str
    signature: str | None = None
    role: str | None = None
    rank: int | None = None
