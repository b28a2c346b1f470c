"""Waits without a missing rank: transfers that stall, and waits that only stacks show."""

from __future__ import annotations

from collections.abc import Iterable

from ncclops.flight import waits as waiting
from ncclops.flight.absences import absent_sides
from ncclops.flight.analysis_context import AnalysisContext, FlightFinding, Side, waiting_side
from ncclops.flight.disagreements import frames_at
from ncclops.flight.finding_kinds import FindingKind
from ncclops.flight.model import OperationState
from ncclops.flight.waits import Op
from ncclops.stacks.ownership import user_frames

_ROOTED = {"broadcast", "reduce", "gather", "scatter"}


def stalls(context: AnalysisContext) -> list[FlightFinding]:
    """Operations that all members have entered, without disagreement, and that do not end."""
    inside: dict[Op, list[int]] = {}
    for rank, op in context.waits.heads.items():
        if not context.waits.edges.get(rank) and rank not in context.waits.late:
            inside.setdefault(op, []).append(rank)
    found = []
    for op, ranks in inside.items():
        if _in_flight(context, op, ranks) or _someone_late(context, op):
            continue
        found.append(_stall(context, op, sorted(ranks)))
    return found


def _someone_late(context: AnalysisContext, op: Op) -> bool:
    return any(rank in context.waits.late for rank in context.groups[op.group].members)


def _in_flight(context: AnalysisContext, op: Op, ranks: list[int]) -> bool:
    group = context.groups[op.group]
    taken = [about.record.taken_at for r in ranks if (about := context.about(r)).record is not None]
    known = [at for at in taken if at is not None]
    entered = group.entered_s(op.seq)
    if not known or entered is None:
        return False
    return max(known) - entered < waiting.in_flight_s(group)


def _stall(context: AnalysisContext, op: Op, ranks: list[int]) -> FlightFinding:
    group = context.groups[op.group]
    name = context.op_name(op, ranks)
    left = [r for r in group.members if r not in ranks and group.last.get(r, 0) >= op.seq]
    kind, culprits, confidence = FindingKind.STALLED, _not_started(context, op, ranks), 0.8
    if left and name in _ROOTED and group.name.backend == "gloo":
        kind, culprits, confidence = FindingKind.ROOT_MISMATCH, ranks, 0.6
    elif left and op.peer is None:
        culprits = ranks
    role = "culprit" if culprits else "party"
    sides = [waiting_side(context, op, ranks, role)]
    if left:
        frames = frames_at(context.evidence, group, left[0], op.seq)
        sides.append(Side("waiting", tuple(left), f"left #{op.seq}", None, frames))
    return FlightFinding(
        kind=kind,
        group=group,
        seq=op.seq if op.peer is None else None,
        op=name,
        culprits=tuple(culprits),
        confidence=confidence,
        sides=tuple(sides),
    )


def _not_started(context: AnalysisContext, op: Op, ranks: list[int]) -> list[int]:
    """Ranks whose device has not begun what it has begun on others: its stream is held up."""
    states: dict[int, int] = {}
    for rank in ranks:
        track = context.groups[op.group].tracks.get(rank)
        index = track.index(op.seq) if track is not None else None
        if track is not None and index is not None:
            states[rank] = track.states[index]
    if OperationState.STARTED not in states.values():
        return []
    return [rank for rank, state in states.items() if state == OperationState.ENQUEUED]


def unrecorded(context: AnalysisContext) -> list[FlightFinding]:
    """Waits that no recorder has (Gloo's transfers, monitored barriers): from the stacks alone."""
    inside: dict[str, list[int]] = {}
    outside: list[int] = []
    for rank, about in sorted(context.evidence.ranks.items()):
        if about.place is not None and about.place.inside is not None:
            inside.setdefault(about.place.inside, []).append(rank)
        elif waiting.is_elsewhere(about.place):
            outside.append(rank)
    if not inside or context.waits.late:
        return []
    # What is in flight is in a stack, too: the recorder would know of it in a moment.
    recorded = set(_last_ops(context))
    inside = {name: ranks for name, ranks in inside.items() if name not in recorded}
    if not inside:
        return []
    most = max(inside, key=lambda name: len(inside[name]))
    elsewhere = sorted(rank for name, ranks in inside.items() if name != most for rank in ranks)
    absent = outside or elsewhere
    sides = [_stack_side(context, inside[most], "waiting" if absent else "party")]
    sides += absent_sides(context, absent)
    sides += absent_sides(context, elsewhere, "waiting") if outside else []
    kind = FindingKind.NEVER_ARRIVED if absent else FindingKind.STALLED
    return [FlightFinding(kind, None, None, most, tuple(absent), 0.5, tuple(sides))]


def _last_ops(context: AnalysisContext) -> Iterable[str]:
    for group in context.groups:
        for rank, track in group.tracks.items():
            call = group.call(context.evidence, rank, track.last) if track.seqs else None
            if call is not None:
                yield call.op


def _stack_side(context: AnalysisContext, ranks: list[int], role: str) -> Side:
    place = context.about(ranks[0]).place
    assert place is not None
    return Side(role, tuple(ranks), f"in {place.inside}", None, user_frames(place.frames))
