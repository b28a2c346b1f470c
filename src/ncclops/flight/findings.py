"""What is wrong, out of who waits for whom and who disagrees about what; the gravest first."""

from __future__ import annotations

import re

from ncclops.flight import waits as waiting
from ncclops.flight.absences import absences
from ncclops.flight.analysis_context import Finding, Scene, Side, waiting_side
from ncclops.flight.compare import Mismatch, frames_at
from ncclops.flight.groups import Group
from ncclops.flight.model import Evidence
from ncclops.flight.stalls import stalls, unrecorded
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
# Gloo ends the process when a peer's message is larger than its own buffer.
_ABORTED = re.compile(r"abrt|abort|signal 6\b|code -6\b", re.IGNORECASE)


def find(
    evidence: Evidence, groups: list[Group], waits: Waits, mismatches: list[Mismatch]
) -> list[Finding]:
    """All findings, the one that explains most first."""
    scene = Scene(evidence, groups, waits, mismatches)
    live = {id(mismatch.group) for mismatch in mismatches if mismatch.live}
    found = [_from_mismatch(scene, mismatch) for mismatch in mismatches]
    found += deadlocks(scene)
    found += absences(scene)
    found += stalls(scene)
    found += unrecorded(scene) if not found else []
    found = [
        finding for finding in found if id(finding.group) not in live or _stands(scene, finding)
    ]
    return sorted(found, key=lambda finding: _weight(scene, finding))


def _stands(scene: Scene, finding: Finding) -> bool:
    """Whether a finding in a group whose ranks disagree is more than the consequence of that."""
    if "mismatch" in finding.kind:
        # A rank that Gloo ended for what it received is the victim of those who disagree.
        return not any(scene.about(rank).overrun for rank in finding.culprits)
    if finding.kind == "rank-died":
        return True
    mismatch = next(m for m in scene.mismatches if m.group is finding.group and m.live)
    seq = finding.seq if finding.seq is not None else -1
    return finding.kind == "never-arrived" and seq <= mismatch.seq


def _weight(scene: Scene, finding: Finding) -> tuple[object, ...]:
    grave = KINDS.index(finding.kind)
    if finding.kind == "rank-died":
        ends = [scene.about(rank).ended for rank in finding.culprits]
        if all(end is None for end in ends):
            grave = KINDS.index("stalled")  # nothing is known of them, while others are known
        elif _disagree(scene) and all(_ended_by_gloo(scene, rank) for rank in finding.culprits):
            grave = KINDS.index("root-mismatch")
    started = None
    if finding.group is not None and finding.seq is not None:
        started = finding.group.entered_s(finding.seq)
    return not finding.hung, grave, started or float("inf")


def _ended_by_gloo(scene: Scene, rank: int) -> bool:
    about = scene.about(rank)
    return about.overrun is not None or bool(about.ended and _ABORTED.search(about.ended))


def _disagree(scene: Scene) -> bool:
    return any(mismatch.live for mismatch in scene.mismatches)


def _from_mismatch(scene: Scene, mismatch: Mismatch) -> Finding:
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


def deadlocks(scene: Scene) -> list[Finding]:
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
            waiting_side(scene, op, ranks, "culprit" if ranks[0] in culprits else "waiting")
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


def _only_guessed(scene: Scene, part: tuple[int, ...]) -> bool:
    """Whether a circle may come from taking ranks for members of groups that they are not in.

    A rank outside of it that all wait for, and that waits for nobody, explains as much.
    """
    guessed = any(not scene.groups[scene.waits.heads[rank].group].members_known for rank in part)
    causes = waiting.roots(scene.waits)
    return guessed and any(scene.waits.edges[rank] & causes for rank in part)
