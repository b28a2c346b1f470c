"""What is wrong, out of who waits for whom and who disagrees about what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ncclops.flight import waits as waiting
from ncclops.flight.compare import Mismatch, frames_at
from ncclops.flight.frames import user_frames
from ncclops.flight.groups import Group, ranks_text
from ncclops.flight.model import Call, Evidence, Frame, RankEvidence, State, Track
from ncclops.flight.waits import Op, Waits

# The kinds of findings, the gravest first: the order in which they explain each other.
KINDS = (
    "rank-died",
    "order-mismatch",
    "op-mismatch",
    "shape-mismatch",
    "dtype-mismatch",
    "root-mismatch",
    "cross-group-deadlock",
    "extra-call",
    "never-arrived",
    "stalled",
)
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
# Gloo ends the process when a peer's message is larger than its own buffer.
_ABORTED = re.compile(r"abrt|abort|signal 6\b|code -6\b", re.IGNORECASE)


@dataclass(frozen=True)
class Side:
    """Ranks in the same position. ``role`` is waiting, culprit, or party where nobody is to blame.

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
class Finding:
    """One thing that is wrong.

    ``confidence`` is 0 to 1. ``hung`` is False for a disagreement that the job survived.
    ``circle`` is a way round in a deadlock: each rank waits for the next, the last for the first.
    """

    kind: str
    group: Group | None
    seq: int | None
    op: str | None
    culprits: tuple[int, ...]
    confidence: float
    sides: tuple[Side, ...]
    hung: bool = True
    circle: tuple[int, ...] = ()


@dataclass
class _Scene:
    evidence: Evidence
    groups: list[Group]
    waits: Waits
    mismatches: list[Mismatch] = field(default_factory=list)

    def call(self, rank: int, op: Op) -> Call | None:
        return self.groups[op.group].call(self.evidence, rank, op.seq)

    def op_name(self, op: Op, ranks: Iterable[int]) -> str:
        if op.peer is not None:
            return "send" if op.sends else "recv"
        for rank in ranks:
            if (call := self.call(rank, op)) is not None:
                return call.op
        return "a collective"

    def about(self, rank: int) -> RankEvidence:
        return self.evidence.ranks.get(rank) or RankEvidence(rank)


def find(
    evidence: Evidence, groups: list[Group], waits: Waits, mismatches: list[Mismatch]
) -> list[Finding]:
    """All findings, the one that explains most first."""
    scene = _Scene(evidence, groups, waits, mismatches)
    live = {id(mismatch.group) for mismatch in mismatches if mismatch.live}
    found = [_from_mismatch(scene, mismatch) for mismatch in mismatches]
    found += _deadlocks(scene)
    found += _absences(scene)
    found += _stalls(scene)
    found += _unrecorded(scene) if not found else []
    found = [
        finding for finding in found if id(finding.group) not in live or _stands(scene, finding)
    ]
    return sorted(found, key=lambda finding: _weight(scene, finding))


def _stands(scene: _Scene, finding: Finding) -> bool:
    """Whether a finding in a group whose ranks disagree is more than the consequence of that."""
    if "mismatch" in finding.kind:
        # A rank that Gloo ended for what it received is the victim of those who disagree.
        return not any(scene.about(rank).overrun for rank in finding.culprits)
    if finding.kind == "rank-died":
        return True
    mismatch = next(m for m in scene.mismatches if m.group is finding.group and m.live)
    seq = finding.seq if finding.seq is not None else -1
    return finding.kind == "never-arrived" and seq <= mismatch.seq


def _weight(scene: _Scene, finding: Finding) -> tuple[object, ...]:
    grave = KINDS.index(finding.kind)
    if finding.kind == "rank-died":
        ends = [scene.about(rank).ended for rank in finding.culprits]
        if all(end is None for end in ends):
            grave = KINDS.index("stalled")  # nothing is known of them, while others are known
        elif all(end and _ABORTED.search(end) for end in ends) and _disagree(scene):
            grave = KINDS.index("root-mismatch")
    started = None
    if finding.group is not None and finding.seq is not None:
        started = finding.group.entered_s(finding.seq)
    return not finding.hung, grave, started or float("inf")


def _disagree(scene: _Scene) -> bool:
    return any(mismatch.live for mismatch in scene.mismatches)


def _from_mismatch(scene: _Scene, mismatch: Mismatch) -> Finding:
    group, seq = mismatch.group, mismatch.seq
    sides = []
    for call, ranks in mismatch.sides:
        role = "culprit" if set(ranks) <= set(mismatch.odd) else "waiting"
        frames = frames_at(scene.evidence, group, ranks[0], seq)
        sides.append(Side(role, ranks, f"called {call} as #{seq}", call, frames))
    return Finding(
        kind=f"{mismatch.kind}-mismatch",
        group=group,
        seq=seq,
        op=mismatch.sides[0][0].op,
        culprits=mismatch.odd,
        confidence=0.95 if mismatch.clear else 0.6,
        sides=tuple(sides),
        hung=mismatch.live,
    )


def _deadlocks(scene: _Scene) -> list[Finding]:
    found = []
    for part in waiting.circles(scene.waits):
        by_op: dict[Op, list[int]] = {}
        for rank in part:
            by_op.setdefault(scene.waits.heads[rank], []).append(rank)
        if len(by_op) < 2 or _only_guessed(scene, part):
            continue
        fewest = min(map(len, by_op.values()))
        odd = [ranks for ranks in by_op.values() if len(ranks) == fewest]
        culprits = odd[0] if len(odd) == 1 else part
        sides = [
            _waiting_side(scene, op, ranks, "culprit" if ranks[0] in culprits else "waiting")
            for op, ranks in by_op.items()
        ]
        first = scene.waits.heads[part[0]]
        found.append(
            Finding(
                kind="cross-group-deadlock",
                group=scene.groups[first.group],
                seq=first.seq if first.peer is None else None,
                op=scene.op_name(first, by_op[first]),
                culprits=tuple(sorted(culprits)),
                confidence=0.9,
                sides=tuple(sides),
                circle=waiting.a_circle(scene.waits, part),
            )
        )
    return found


def _only_guessed(scene: _Scene, part: tuple[int, ...]) -> bool:
    """Whether a circle may come from taking ranks for members of groups that they are not in.

    A rank outside of it that all wait for, and that waits for nobody, explains as much.
    """
    guessed = any(not scene.groups[scene.waits.heads[rank].group].members_known for rank in part)
    causes = waiting.roots(scene.waits)
    return guessed and any(scene.waits.edges[rank] & causes for rank in part)


def _waiting_side(scene: _Scene, op: Op, ranks: list[int], role: str = "waiting") -> Side:
    group = scene.groups[op.group]
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
    call = scene.call(first, op)
    name = str(call) if call is not None else scene.op_name(op, ranks)
    frames = frames_at(scene.evidence, group, first, op.seq)
    return Side(role, tuple(ranks), f"in {name}, #{op.seq} of group {group}", call, frames)


def _absences(scene: _Scene) -> list[Finding]:
    """Ranks that others wait for and that wait for nobody, by what they are waited for in."""
    waited_in: dict[int, Counter[Op]] = {}
    for rank, targets in scene.waits.edges.items():
        for target in targets:
            waited_in.setdefault(target, Counter())[scene.waits.heads[rank]] += 1
    together: dict[tuple[str, Op], list[int]] = {}
    for target in sorted(waiting.roots(scene.waits)):
        kind = _absence_kind(scene, target)
        op = min(waited_in[target], key=lambda op: (-waited_in[target][op], op.group, op.seq))
        together.setdefault((kind, op), []).append(target)
    found = [_absence(scene, kind, op, absent) for (kind, op), absent in together.items()]
    named = {rank for finding in found for rank in finding.culprits}
    return found + _deaths_nobody_waits_for(scene, named)


def _absence_kind(scene: _Scene, rank: int) -> str:
    about = scene.about(rank)
    if about.ended is not None:
        return "never-arrived" if about.ended_well else "rank-died"
    if about.place is not None and about.place.inside == "monitored_barrier":
        return "op-mismatch"
    if about.record is None and about.place is None and not about.groups:
        return "rank-died"  # nothing at all is left of it
    return "never-arrived"


def _absence(scene: _Scene, kind: str, op: Op, absent: list[int]) -> Finding:
    waiters = sorted(rank for rank, head in scene.waits.heads.items() if head == op)
    group = scene.groups[op.group]
    if kind == "rank-died" and op.peer is None:
        waiters = [rank for rank in group.members if group.last.get(rank, -1) >= op.seq]
        if any(scene.about(rank).overrun for rank in absent):
            kind = "shape-mismatch"
    finished = all(scene.about(rank).ended_well for rank in absent)
    if kind == "never-arrived" and len(waiters) == 1 and len(absent) > 1 and finished:
        kind = "extra-call"
    sides = [_waiting_side(scene, op, waiters)]
    sides += [_absent_side(scene, rank) for rank in absent]
    return Finding(
        kind=kind,
        group=group,
        seq=op.seq if op.peer is None else None,
        op=scene.op_name(op, waiters),
        culprits=tuple(waiters if kind == "extra-call" else absent),
        confidence=_certainty(scene, kind, absent),
        sides=tuple(sides),
    )


def _certainty(scene: _Scene, kind: str, absent: list[int]) -> float:
    abouts = [scene.about(rank) for rank in absent]
    if all(about.ended for about in abouts):
        return 0.95
    if all(about.record or about.place for about in abouts):
        return 0.95 if all(about.place for about in abouts) else 0.85
    return 0.6 if kind == "rank-died" else 0.7


def _absent_side(scene: _Scene, rank: int) -> Side:
    about = scene.about(rank)
    frames = user_frames(about.place.frames) if about.place is not None else ()
    track, index = _newest(about)
    if not frames and about.record is not None and track is not None and track.frames[index] >= 0:
        frames = about.record.frames[track.frames[index]]
    return Side("culprit", (rank,), doing(scene.evidence, rank), None, frames)


def doing(evidence: Evidence, rank: int) -> str:
    """What a rank that waits for nobody does, in words."""
    about = evidence.ranks.get(rank)
    if about is None or (about.record is None and about.place is None and not about.ended):
        reason = f": {about.missing}" if about is not None and about.missing else ""
        return f"left no record, so it died or cannot answer{reason}"
    if about.overrun is not None:
        received, room = about.overrun
        return f"it received {received} bytes with room for {room}; {about.ended}"
    if about.ended is not None:
        return about.ended
    told = evidence.faults.get(rank)
    said = f"it reported {told}; " if told else ""
    place = about.place
    if place is None or (place.frame is None and place.inside is None):
        return said + _last_done(about)
    if place.frame is None:
        return f"{said}it is inside {place.inside}"
    if place.inside is not None:
        return f"{said}it is inside {place.inside}, called in {place.frame}"
    where = f"{said}it is in {place.frame}"
    return f"{where} ({place.what})" if place.what else where


def _last_done(about: RankEvidence) -> str:
    """The newest entry of a rank, for want of its stacks."""
    where = "where it is instead is not recorded"
    track, index = _newest(about)
    if track is None or about.record is None:
        return where
    call = about.record.calls[track.calls[index]]
    stack = track.frames[index]
    line = f" in {about.record.frames[stack][0]}" if stack >= 0 else ""
    return f"{where}, its last was {call.op} #{track.seqs[index]} of group {track.group}{line}"


def _newest(about: RankEvidence) -> tuple[Track | None, int]:
    tracks = [t for t in about.record.tracks.values() if t.seqs] if about.record else []
    return max(tracks, key=lambda track: track.order[-1], default=None), -1


def _deaths_nobody_waits_for(scene: _Scene, named: set[int]) -> list[Finding]:
    """Ranks that are known to have died; their peers' operations may have failed at once."""
    dead = [
        rank
        for rank, about in sorted(scene.evidence.ranks.items())
        if about.ended and not about.ended_well and rank not in named
    ]
    if not dead:
        return []
    group = next((g for g in scene.groups if set(dead) <= set(g.members)), None)
    last = max(group.last.values(), default=0) if group is not None else 0
    seq = last or None
    sides = [_absent_side(scene, rank) for rank in dead]
    op = None
    if group is not None and seq is not None:
        others = [rank for rank, number in group.last.items() if number == seq]
        at = Op(scene.groups.index(group), seq)
        op = scene.op_name(at, others)
        side = _waiting_side(scene, at, others)
        sides.insert(0, side)
    return [Finding("rank-died", group, seq, op, tuple(dead), 0.9, tuple(sides))]


def _stalls(scene: _Scene) -> list[Finding]:
    """Operations that all members have entered, without disagreement, and that do not end."""
    inside: dict[Op, list[int]] = {}
    for rank, op in scene.waits.heads.items():
        if not scene.waits.edges.get(rank) and rank not in scene.waits.late:
            inside.setdefault(op, []).append(rank)
    found = []
    for op, ranks in inside.items():
        if any(op in set(_heads_of(scene, other)) for other in scene.waits.edges if other in ranks):
            continue
        if _in_flight(scene, op, ranks) or _someone_late(scene, op):
            continue
        found.append(_stall(scene, op, sorted(ranks)))
    return found


def _heads_of(scene: _Scene, rank: int) -> list[Op]:
    return [scene.waits.heads[rank]] if scene.waits.edges.get(rank) else []


def _someone_late(scene: _Scene, op: Op) -> bool:
    return any(rank in scene.waits.late for rank in scene.groups[op.group].members)


def _in_flight(scene: _Scene, op: Op, ranks: list[int]) -> bool:
    group = scene.groups[op.group]
    taken = [about.record.taken_at for r in ranks if (about := scene.about(r)).record is not None]
    known = [at for at in taken if at is not None]
    entered = group.entered_s(op.seq)
    if not known or entered is None:
        return False
    return max(known) - entered < waiting.IN_FLIGHT_S


def _stall(scene: _Scene, op: Op, ranks: list[int]) -> Finding:
    group = scene.groups[op.group]
    name = scene.op_name(op, ranks)
    left = [r for r in group.members if r not in ranks and group.last.get(r, 0) >= op.seq]
    kind, culprits, confidence = "stalled", _not_started(scene, op, ranks), 0.8
    if left and name in _ROOTED and group.name.backend == "gloo":
        kind, culprits, confidence = "root-mismatch", ranks, 0.6
    elif left and op.peer is None:
        culprits = ranks
    role = "culprit" if culprits else "party"
    sides = [_waiting_side(scene, op, ranks, role)]
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


def _not_started(scene: _Scene, op: Op, ranks: list[int]) -> list[int]:
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


def _unrecorded(scene: _Scene) -> list[Finding]:
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
    others = sorted(outside + [r for name, rs in inside.items() if name != most for r in rs])
    sides = [_stack_side(scene, inside[most], "waiting" if others else "party")]
    sides += [_absent_side(scene, rank) for rank in others]
    kind = "never-arrived" if others else "stalled"
    return [Finding(kind, None, None, most, tuple(others), 0.5, tuple(sides))]


def _last_ops(scene: _Scene) -> Iterable[str]:
    for group in scene.groups:
        for rank, track in group.tracks.items():
            call = group.call(scene.evidence, rank, track.last) if track.seqs else None
            if call is not None:
                yield call.op


def _stack_side(scene: _Scene, ranks: list[int], role: str) -> Side:
    place = scene.about(ranks[0]).place
    assert place is not None
    return Side(role, tuple(ranks), f"in {place.inside}", None, user_frames(place.frames))


def others_text(ranks: tuple[int, ...]) -> str:
    """``rank 3`` or ``ranks 0-2``."""
    return f"rank{'s' * (len(ranks) != 1)} {ranks_text(ranks)}"
