"""``environment.json`` of a rank, and other snapshots of an environment: one reader, one writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ncclops.record.document_kind import DocumentKind


@dataclass(frozen=True)
class EnvSnapshot:
    """One environment. ``files`` is what NCCL adds to it from its configuration files.

    ``taken`` is in seconds since the epoch; ``redacted``: secrets have been taken out. ``marks``
    are of their values (``redaction.marks``), by which what leaves the machine is
    searched for them.
    """

    label: str
    variables: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    taken: float | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    redacted: bool = True
    marks: Sequence[tuple[int, int]] = ()

    def to_json(self) -> dict[str, Any]:
        """The document ``ncclops.env-snapshot/1``."""
        return ENVIRONMENT.to_json(self)

    @property
    def effective(self) -> dict[str, str]:
        """What NCCL and everything else sees: the files never overrule the environment."""
        return {**self.files, **self.variables}


ENVIRONMENT = DocumentKind(
    "ncclops.env-snapshot/1", EnvSnapshot, "write one with `ncclops env snapshot`"
)
