"""What the flight recorders of an incident say together; the analysis is ``ncclops.flight``'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclops.errors import NcclopsError
from ncclops.flight.finding_kinds import FindingKind
from ncclops.stacks.frame import Frame

if TYPE_CHECKING:
    from ncclops.flight.analysis_context import Side


@dataclass(frozen=True)
class Recorded:
    """The analysis's first finding; see ``ncclops.flight.findings``.

    ``frame`` is the user's line of the first culprit, where it is known, ``callers`` what called
    that (the innermost first), and ``others_frame`` of the ranks that are not to blame.
    ``in_data_loader``: a culprit stands in its data loader. ``ended_for_silence``: one did not
    answer, and was ended for that; the sentence says so.
    """

    kind: FindingKind
    sentence: str
    culprits: tuple[int, ...]
    confidence: float
    hung: bool
    frame: Frame | None = None
    callers: tuple[Frame, ...] = ()
    others_frame: Frame | None = None
    in_data_loader: bool = False
    ended_for_silence: bool = False

    @property
    def is_mismatch(self) -> bool:
        """Whether ranks made different calls, and it is known which one differs."""
        return self.hung and bool(self.culprits) and self.kind.is_mismatch

    def to_json(self) -> dict[str, Any]:
        frames = {
            name: None if frame is None else frame.to_json()
            for name, frame in (("frame", self.frame), ("others_frame", self.others_frame))
        }
        lists = {
            "culprits": list(self.culprits),
            "callers": [frame.to_json() for frame in self.callers],
        }
        return vars(self) | lists | frames


def analyse(snapshots: Path) -> Recorded | None:
    """What is wrong according to the snapshots; None if nothing, or if they say nothing."""
    from ncclops import flight

    try:
        report = flight.analyze(snapshots)
    except NcclopsError:  # no snapshot can be read: the rest of the page is still shown
        return None
    if not report.findings:
        return None
    first = report.findings[0]
    theirs = [side for side in first.sides if set(side.ranks) & set(first.culprits[:1])]
    others = [side for side in first.sides if side.role == "waiting"]
    frame, *callers = _frames(theirs) or (None,)
    known = report.evidence.ranks
    culprits = [known[rank] for rank in first.culprits if rank in known]
    return Recorded(
        first.kind,
        report.sentence,
        first.culprits,
        first.confidence,
        first.hung,
        frame=frame,
        callers=tuple(each for each in callers if each is not None),
        others_frame=next(iter(_frames(others)), None),
        in_data_loader=any(one.place and one.place.in_data_loader for one in culprits),
        ended_for_silence=any(one.ended and one.silent and not one.overrun for one in culprits),
    )


def _frames(sides: Sequence[Side]) -> tuple[Frame, ...]:
    """The user's, the innermost first, of the first side that has any."""
    return next((side.frames for side in sides if side.frames), ())
