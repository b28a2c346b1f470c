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
