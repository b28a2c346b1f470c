"""What findings are made of: sides, and the context that they are taken from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ncclops.flight.disagreements import Mismatch, frames_at
from ncclops.flight.finding_kinds import FindingKind
from ncclops.flight.groups import Group
from ncclops.flight.model import SOME_COLLECTIVE, Call, FlightEvidence, RankEvidence
from ncclops.flight.waits import Op, Waits
from ncclops.stacks.frame import Frame


@dataclass(frozen=True)
class Side:
    """Ranks in the same position. ``role`` is waiting, culprit, or party where no rank is to blame.

    ``call`` is what they enqueued, ``doing`` what they do in words; ``frames`` are the user's,
    innermost first.
    """

    role: str
    ranks: tuple[int, ...]
    doing: str
    call: Call | None = None
    frames: tuple[Frame, ...] = ()

    @property
    def frame(self) -> Frame | None:
        return self.frames[0] if self.frames else None


@dataclass(frozen=True)
class FlightFinding:
    """One thing that is wrong.

    ``confidence`` is 0 to 1. ``hung`` is False for a disagreement that the job survived.
    ``circle`` is a way round in a deadlock: each rank waits for the next, the last for the first.
    """

    kind: FindingKind
    group: Group | None
    seq: int | None
    op: str | None
    culprits: tuple[int, ...]
    confidence: float
    sides: tuple[Side, ...]
    hung: bool = True
    circle: tuple[int, ...] = ()


@dataclass
class AnalysisContext:
    """Everything that findings are made from."""

    evidence: FlightEvidence
    groups: list[Group]
    waits: Waits
    mismatches: list[Mismatch] = field(default_factory=list)

    def call(self, rank: int, op: Op) -> Call | None:
        return self.groups[op.group].call(self.evidence, rank, op.seq)

    def op_name(self, op: Op, ranks: Sequence[int]) -> str:
        if op.peer is not None:
            return "send" if op.sends else "recv"
        for rank in ranks:
            if (call := self.call(rank, op)) is not None:
                return call.op
        # Only counted: Gloo records no transfers, and stacks may show it.
        places = (self.about(rank).place for rank in ranks)
        return next((place.inside for place in places if place and place.inside), SOME_COLLECTIVE)

    def about(self, rank: int) -> RankEvidence:
        return self.evidence.ranks.get(rank) or RankEvidence(rank)


def waiting_side(context: AnalysisContext, op: Op, ranks: list[int], role: str = "waiting") -> Side:
    group = context.groups[op.group]
    first = ranks[0]
    if op.peer is not None:
        track = group.tracks[first]
        frames = next(
            (
                t.frames
                for t in track.pending_p2p
                if group.members[t.peer] == op.peer and t.sends == op.sends
            ),
            (),
        )
        word = f"send to rank {op.peer}" if op.sends else f"recv from rank {op.peer}"
        return Side(role, tuple(ranks), f"in a {word}", None, frames)
    call = context.call(first, op)
    name = str(call) if call is not None else context.op_name(op, ranks)
    frames = frames_at(context.evidence, group, first, op.seq)
    return Side(role, tuple(ranks), f"in {name}, #{op.seq} of group {group}", call, frames)
