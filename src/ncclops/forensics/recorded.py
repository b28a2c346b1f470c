"""What the flight recorders of an incident say together; the analysis is ``ncclops.flight``'s."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops.errors import NcclopsError
from ncclops.forensics.stacks import Frame


@dataclass(frozen=True)
class Recorded:
    """The analysis's first finding; see ``ncclops.flight.findings.Finding``.

    ``frame`` is the user's line of the first culprit, where it is known.
    """

    kind: str
    sentence: str
    culprits: tuple[int, ...]
    confidence: float
    hung: bool
    frame: Frame | None = None

    def to_json(self) -> dict[str, Any]:
        frame = None if self.frame is None else vars(self.frame)
        return vars(self) | {"culprits": list(self.culprits), "frame": frame}


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
    frames = (s.frame for s in first.sides if s.frame and {*first.culprits[:1]} & {*s.ranks})
    found = next(frames, None)
    return Recorded(
        first.kind,
        report.sentence,
        first.culprits,
        first.confidence,
        first.hung,
        frame=None if found is None else Frame(found.file, found.line, found.function),
    )
