"""Ranks that others wait for and that wait for no other rank: not arrived, elsewhere, or dead."""

from __future__ import annotations

from collections import Counter

from ncclops.flight import waits as waiting
from ncclops.flight.analysis_context import AnalysisContext, FlightFinding, Side, waiting_side
from ncclops.flight.finding_kinds import FindingKind
from ncclops.flight.model import FlightEvidence, RankEvidence, Track
from ncclops.flight.waits import Op
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import user_frames


def absences(context: AnalysisContext) -> list[FlightFinding]:
    """Ranks that others wait for and that wait for no rank, by what they are waited for in."""
    waited_in: dict[int, Counter[Op]] = {}
    for rank, targets in context.waits.edges.items():
        for target in targets:
            waited_in.setdefault(target, Counter())[context.waits.heads[rank]] += 1
    together: dict[tuple[FindingKind, Op], list[int]] = {}
    for target in sorted(waiting.roots(context.waits)):
        kind = _absence_kind(context, target)
        op = min(waited_in[target], key=lambda op: (-waited_in[target][op], op.group, op.seq))
        together.setdefault((kind, op), []).append(target)
    found = [_absence(context, kind, op, absent) for (kind, op), absent in together.items()]
    named = {rank for finding in found for rank in finding.culprits}
    return found + _deaths_without_waiters(context, named)


def _absence_kind(context: AnalysisContext, rank: int) -> FindingKind:
    about = context.about(rank)
    stood_still = about.no_python_s is not None or about.stopped
    if about.silent and (stood_still if about.place is None else about.place.inside is None):
        return FindingKind.NEVER_ARRIVED  # it was ended because of that
    if about.ended is not None:
        return FindingKind.NEVER_ARRIVED if about.ended_well else FindingKind.RANK_DIED
    if about.place is not None and about.place.inside == "monitored_barrier":
        return FindingKind.OP_MISMATCH
    if about.record is None and about.place is None and not about.groups:
        return FindingKind.RANK_DIED  # nothing at all is left of it
    return FindingKind.NEVER_ARRIVED


def _absence(
    context: AnalysisContext, kind: FindingKind, op: Op, absent: list[int]
) -> FlightFinding:
    held_up: list[int] = []
    if kind == FindingKind.NEVER_ARRIVED:
        absent, held_up = _split_by_waits(context, absent)
    waiters = sorted(rank for rank, head in context.waits.heads.items() if head == op)
    group = context.groups[op.group]
    if kind == FindingKind.RANK_DIED and op.peer is None:
        waiters = [rank for rank in group.members if group.last.get(rank, -1) >= op.seq]
        if any(context.about(rank).overrun for rank in absent):
            kind = FindingKind.SHAPE_MISMATCH
    finished = all(context.about(rank).ended_well for rank in absent)
    if kind == FindingKind.NEVER_ARRIVED and len(waiters) == 1 and len(absent) > 1 and finished:
        kind = FindingKind.EXTRA_CALL
    sides = [waiting_side(context, op, waiters)]
    sides += absent_sides(context, absent) + absent_sides(context, held_up, "waiting")
    return FlightFinding(
        kind=kind,
        group=group,
        seq=op.seq if op.peer is None else None,
        op=context.op_name(op, waiters),
        culprits=tuple(waiters if kind == FindingKind.EXTRA_CALL else absent),
        confidence=_certainty(context, kind, absent),
        sides=tuple(sides),
    )


def _split_by_waits(context: AnalysisContext, absent: list[int]) -> tuple[list[int], list[int]]:
    """Of ranks that did not come those to blame, and those that others of them may hold up.

    A rank in a call of torch.distributed that no recorder has (Gloo's transfers) waits as well.
    """
    places = {rank: context.about(rank).place for rank in absent}
    held_up = [rank for rank, place in places.items() if place is not None and place.inside]
    elsewhere = [rank for rank in absent if rank not in held_up]
    if not any(waiting.is_elsewhere(places[rank]) for rank in elsewhere):
        return absent, []
    return elsewhere, held_up


def _certainty(context: AnalysisContext, kind: FindingKind, absent: list[int]) -> float:
    abouts = [context.about(rank) for rank in absent]
    if any(about.overrun for about in abouts):
        return 0.8
    if all(about.ended for about in abouts):
        return 0.95
    if all(about.record or about.place for about in abouts):
        return 0.95 if all(about.place for about in abouts) else 0.85
    return 0.6 if kind == FindingKind.RANK_DIED else 0.7


def _deaths_without_waiters(context: AnalysisContext, named: set[int]) -> list[FlightFinding]:
    """Ranks that are known to have died; their peers' operations may have failed at once."""
    dead = [
        rank
        for rank, about in sorted(context.evidence.ranks.items())
        if about.ended and not about.ended_well and rank not in named
    ]
    if not dead:
        return []
    group = next((g for g in context.groups if set(dead) <= set(g.members)), None)
    last = max(group.last.values(), default=0) if group is not None else 0
    seq = last or None
    sides = absent_sides(context, dead)
    op = None
    if group is not None and seq is not None:
        others = [rank for rank, number in group.last.items() if number == seq]
        at = Op(context.groups.index(group), seq)
        op = context.op_name(at, others)
        side = waiting_side(context, at, others)
        sides.insert(0, side)
    return [FlightFinding(FindingKind.RANK_DIED, group, seq, op, tuple(dead), 0.9, tuple(sides))]


def absent_sides(context: AnalysisContext, ranks: list[int], role: str = "culprit") -> list[Side]:
    """Where ``ranks`` are instead, those in the same place together."""
    together: dict[tuple[str, tuple[Frame, ...]], list[int]] = {}
    for rank in ranks:
        there = doing(context.evidence, rank), _frames_of(context.about(rank))
        together.setdefault(there, []).append(rank)
    return [
        Side(role, tuple(found), words, None, frames) for (words, frames), found in together.items()
    ]


def _frames_of(about: RankEvidence) -> tuple[Frame, ...]:
    """The user's frames of where a rank is; without its stacks, of what it did last."""
    frames = user_frames(about.place.frames) if about.place is not None else ()
    track, index = _newest(about)
    if not frames and about.record is not None and track is not None and track.frames[index] >= 0:
        return about.record.frames[track.frames[index]]
    return frames


def doing(evidence: FlightEvidence, rank: int, *, several: bool = False) -> str:
    """What a rank that waits for no other rank does, in words; ``several`` do the same."""
    it_is = "they are" if several else "it is"
    about = evidence.ranks.get(rank)
    if about is None or (about.record is None and about.place is None and not about.ended):
        reason = f": {about.missing}" if about is not None and about.missing else ""
        return f"left no record, so it died or cannot answer{reason}"
    if about.overrun is not None:
        received, room = about.overrun
        return f"it received {received} bytes with room for {room}; {about.ended}"
    place = about.place
    if about.ended is not None and about.silent:
        frame = None if place is None else place.frame
        return f"{_silence(about, frame, it_is)}; its monitor process ended it"
    if about.ended is not None:
        return about.ended
    if place is not None and place.left is not None:
        where = f", raised in {place.frame.short}" if place.frame else ""
        return f"it left by {place.left}{where}"
    fault = evidence.faults.get(rank)
    said = f"it reported {fault}; " if fault else ""
    if place is not None and place.frame is None and place.inside is None and place.what:
        return f"{said}{it_is} {place.what}"
    if place is None or (place.frame is None and place.inside is None):
        return said + _last_done(about)
    if place.frame is None:
        return f"{said}{it_is} inside {place.inside}"
    if place.inside is not None:
        return f"{said}{it_is} inside {place.inside}, called in {place.frame.short}"
    where = f"{said}{it_is} in {place.frame.short}"
    return f"{where} ({place.what})" if place.what else where


def _silence(about: RankEvidence, frame: Frame | None, it_is: str) -> str:
    """Where a rank is that does not answer, and why it does not."""
    there = f"{it_is} in {frame.short}" if frame is not None else ""
    if about.stopped:
        return (there + ", " if there else "it was ") + "stopped by a signal (SIGSTOP, a debugger)"
    if about.no_python_s is None:
        return there or "it did not answer"
    why = f"has run no Python for {about.no_python_s:.0f} s, so it holds the GIL in a call into C"
    return f"{there} and {why}" if there else f"it {why}"


def _last_done(about: RankEvidence) -> str:
    """The newest entry of a rank, where its stacks are missing."""
    where = "where it is instead is not recorded"
    track, index = _newest(about)
    if track is None or about.record is None:
        return where
    call = about.record.calls[track.calls[index]]
    stack = track.frames[index]
    line = f" in {about.record.frames[stack][0].short}" if stack >= 0 else ""
    return f"{where}, its last was {call.op} #{track.seqs[index]} of group {track.group}{line}"


def _newest(about: RankEvidence) -> tuple[Track | None, int]:
    tracks = [t for t in about.record.tracks.values() if t.seqs] if about.record else []
    return max(tracks, key=lambda track: track.order[-1], default=None), -1
