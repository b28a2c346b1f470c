"""What the flight recorders of an incident say together; the analysis is ``ncclops.flight``'s."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops.errors import NcclopsError


@dataclass(frozen=True)
class Recorded:
    """The analysis's first finding; see ``ncclops.flight.findings.Finding``."""

    kind: str
    sentence: str
    culprits: tuple[int, ...]
    confidence: float
    hung: bool

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"culprits": list(self.culprits)}


def analyse(pictures: Path) -> Recorded | None:
    """What is wrong according to the pictures; None if nothing, or if they say nothing."""
    from ncclops import flight

    try:
        report = flight.analyze(pictures)
    except NcclopsError:  # no picture that can be read: the rest of the page still can be told
        return None
    if not report.findings:
        return None
    first = report.findings[0]
    return Recorded(first.kind, report.sentence, first.culprits, first.confidence, first.hung)
