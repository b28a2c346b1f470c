"""Waits without anybody missing: transfers that stall, and waits that only stacks know of."""

from __future__ import annotations

from collections.abc import Iterable

from ncclops.flight import waits as waiting
from ncclops.flight.absences import absent_sides
from ncclops.flight.analysis_context import Finding, Scene, Side, waiting_side
from ncclops.flight.compare import frames_at
from ncclops.flight.model import State
from ncclops.flight.waits import Op
from ncclops.stacks.ownership import user_frames

_ROOTED = {"broadcast", "reduce", "gather", "scatter"}


def stalls(scene: Scene) -> list[Finding]:
    """Operations that all members have entered, without disagreement, and that do not end."""
    inside: dict[Op, list[int]] = {}
    for rank, op in scene.waits.heads.items():
        if not scene.waits.edges.get(rank) and rank not in scene.waits.late:
            inside.setdefault(op, []).append(rank)
    found = []
    for op, ranks in inside.items():
        if _in_flight(scene, op, ranks) or _someone_late(scene, op):
            continue
        found.append(_stall(scene, op, sorted(ranks)))
    return found


def _someone_late(scene: Scene, op: Op) -> bool:
    return any(rank in scene.waits.late for rank in scene.groups[op.group].members)


def _in_flight(scene: Scene, op: Op, ranks: list[int]) -> bool:
    group = scene.groups[op.group]
    taken = [about.record.taken_at for r in ranks if (about := scene.about(r)).record is not None]
    known = [at for at in taken if at is not None]
    entered = group.entered_s(op.seq)
    if not known or entered is None:
        return False
    return max(known) - entered < waiting.IN_FLIGHT_S


def _stall(scene: Scene, op: Op, ranks: list[int]) -> Finding:
    group = scene.groups[op.group]
    name = scene.op_name(op, ranks)
    left = [r for r in group.members if r not in ranks and group.last.get(r, 0) >= op.seq]
    kind, culprits, confidence = "stalled", _not_started(scene, op, ranks), 0.8
    if left and name in _ROOTED and group.name.backend == "gloo":
        kind, culprits, confidence = "root-mismatch", ranks, 0.6
    elif left and op.peer is None:
        culprits = ranks
    role = "culprit" if culprits else "party"
    sides = [waiting_side(scene, op, ranks, role)]
    if left:
        frames = frames_at(scene.evidence, group, left[0], op.seq)
        sides.append(Side("waiting", tuple(left), f"left #{op.seq}", None, frames))
    return Finding(
        kind=kind,
        group=group,
        seq=op.seq if op.peer is None else None,
        op=name,
        culprits=tuple(culprits),
        confidence=confidence,
        sides=tuple(sides),
    )


def _not_started(scene: Scene, op: Op, ranks: list[int]) -> list[int]:
    """Ranks whose device has not begun what it has begun on others: its stream is held up."""
    states: dict[int, int] = {}
    for rank in ranks:
        track = scene.groups[op.group].tracks.get(rank)
        index = track.index(op.seq) if track is not None else None
        if track is not None and index is not None:
            states[rank] = track.states[index]
    if State.STARTED not in states.values():
        return []
    return [rank for rank, state in states.items() if state == State.ENQUEUED]


def unrecorded(scene: Scene) -> list[Finding]:
    """Waits that no recorder has (Gloo's transfers, monitored barriers): from the stacks alone."""
    inside: dict[str, list[int]] = {}
    outside: list[int] = []
    for rank, about in sorted(scene.evidence.ranks.items()):
        if about.place is not None and about.place.inside is not None:
            inside.setdefault(about.place.inside, []).append(rank)
        elif waiting.is_elsewhere(about.place):
            outside.append(rank)
    if not inside or scene.waits.late:
        return []
    # What is in flight is in a stack, too: the recorder would know of it in a moment.
    recorded = set(_last_ops(scene))
    inside = {name: ranks for name, ranks in inside.items() if name not in recorded}
    if not inside:
        return []
    most = max(inside, key=lambda name: len(inside[name]))
    elsewhere = sorted(rank for name, ranks in inside.items() if name != most for rank in ranks)
    absent = outside or elsewhere
    sides = [_stack_side(scene, inside[most], "waiting" if absent else "party")]
    sides += absent_sides(scene, absent)
    sides += absent_sides(scene, elsewhere, "waiting") if outside else []
    kind = "never-arrived" if absent else "stalled"
    return [Finding(kind, None, None, most, tuple(absent), 0.5, tuple(sides))]


def _last_ops(scene: Scene) -> Iterable[str]:
    for group in scene.groups:
        for rank, track in group.tracks.items():
            call = group.call(scene.evidence, rank, track.last) if track.seqs else None
            if call is not None:
                yield call.op


def _stack_side(scene: Scene, ranks: list[int], role: str) -> Side:
    place = scene.about(ranks[0]).place
    assert place is not None
    return Side(role, tuple(ranks), f"in {place.inside}", None, user_frames(place.frames))
