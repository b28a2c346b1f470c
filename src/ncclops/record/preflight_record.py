"""``preflight.json``: what the last check before a start has found; ``ncclops preflight --json``.

Only what readers of a run need of it; ``ncclops.preflight`` writes it whole.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ncclops.record.document_kind import DocumentKind

Status = Literal["OK", "CANNOT-TELL", "WARN", "FAIL"]


class CheckFound(msgspec.Struct, frozen=True, kw_only=True):
    """One check on one subject of a host, such as ``GPU 3``; ``read`` is what was read there."""

    check: str
    status: Status
    subject: str
    read: str = ""
    wanted: str = ""
    remedy: str = ""


class HostChecked(msgspec.Struct, frozen=True, kw_only=True):
    """A host; ``findings`` of all its checks, or only of those that are not well."""

    name: str = msgspec.field(default="", name="host")
    findings: tuple[CheckFound, ...] = ()


class HostMet(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose edges were checked."""

    name: str
    findings: tuple[CheckFound, ...] = ()


class CauseFound(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong between hosts, for people."""

    kind: str
    severity: str
    what: str = ""
    evidence: str = ""
    remedy: str = ""


class EdgesChecked(msgspec.Struct, frozen=True, kw_only=True):
    """The edges between ``hosts``; ``matrix`` has a row for each, with a letter for each edge from
    it (empty for more hosts than a picture has room for)."""

    hosts: tuple[HostMet, ...] = ()
    causes: tuple[CauseFound, ...] = ()
    matrix: tuple[str, ...] = ()
    edges: int = 0
    failed_edges: int = 0
    unknown_edges: int = 0
    rtt_ms: float = -1.0


class PreflightRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that have checked themselves, and the edges between all; None for a single node."""

    status: Status
    hosts: tuple[HostChecked, ...] = ()
    edges: EdgesChecked | None = None

    def findings(self) -> dict[str, tuple[CheckFound, ...]]:
        """What each host has found in itself, by its name."""
        found = {each.name: each.findings for each in (self.edges or EdgesChecked()).hosts}
        return found | {each.name: each.findings for each in self.hosts}


PREFLIGHT = DocumentKind(
    "ncclops.preflight/1", PreflightRecord, "`ncclops preflight` checks this host anew"
)
