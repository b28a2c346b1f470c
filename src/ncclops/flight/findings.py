"""What is wrong, from which ranks wait for which and which disagree; the gravest first."""

from __future__ import annotations

from ncclops.flight import waits as waiting
from ncclops.flight.absences import absences
from ncclops.flight.analysis_context import AnalysisContext, FlightFinding, Side, waiting_side
from ncclops.flight.disagreements import Mismatch, frames_at
from ncclops.flight.finding_kinds import FindingKind
from ncclops.flight.groups import Group
from ncclops.flight.model import FlightEvidence
from ncclops.flight.stalled_transfers import stalls, unrecorded
from ncclops.flight.waits import Op, Waits

_ORDER = tuple(FindingKind)


def find(
    evidence: FlightEvidence, groups: list[Group], waits: Waits, mismatches: list[Mismatch]
) -> list[FlightFinding]:
    """All findings, the one that explains most first."""
    context = AnalysisContext(evidence, groups, waits, mismatches)
    live = {id(mismatch.group) for mismatch in mismatches if mismatch.live}
    found = [_from_mismatch(context, mismatch) for mismatch in mismatches]
    found += deadlocks(context)
    found += absences(context)
    found += stalls(context)
    found += unrecorded(context) if not found else []
    found = [
        finding for finding in found if id(finding.group) not in live or _stands(context, finding)
    ]
    return sorted(found, key=lambda finding: _weight(context, finding))


def _stands(context: AnalysisContext, finding: FlightFinding) -> bool:
    """Whether a finding in a group whose ranks disagree is more than the consequence of that."""
    if finding.kind.is_mismatch:
        # A rank that Gloo ended for what it received is the victim of those who disagree.
        return not any(context.about(rank).overrun for rank in finding.culprits)
    if finding.kind == FindingKind.RANK_DIED:
        return True
    mismatch = next(m for m in context.mismatches if m.group is finding.group and m.live)
    seq = finding.seq if finding.seq is not None else -1
    return finding.kind == FindingKind.NEVER_ARRIVED and seq <= mismatch.seq


def _weight(context: AnalysisContext, finding: FlightFinding) -> tuple[object, ...]:
    grave = _ORDER.index(finding.kind)
    if finding.kind == FindingKind.RANK_DIED:
        ends = [context.about(rank).ended for rank in finding.culprits]
        if all(end is None for end in ends):
            grave = _ORDER.index(
                FindingKind.STALLED
            )  # nothing is known of them, while others are known
        elif _disagree(context) and all(_ended_by_gloo(context, rank) for rank in finding.culprits):
            grave = _ORDER.index(FindingKind.ROOT_MISMATCH)
    started = None
    if finding.group is not None and finding.seq is not None:
        started = finding.group.entered_s(finding.seq)
    return not finding.hung, grave, started or float("inf")


def _ended_by_gloo(context: AnalysisContext, rank: int) -> bool:
    """Whether it may be so: Gloo aborts when a peer's message is larger than its own buffer."""
    about = context.about(rank)
    return about.overrun is not None or about.ended_signal == "SIGABRT"


def _disagree(context: AnalysisContext) -> bool:
    return any(mismatch.live for mismatch in context.mismatches)


def _from_mismatch(context: AnalysisContext, mismatch: Mismatch) -> FlightFinding:
    group, seq = mismatch.group, mismatch.seq
    sides = []
    for call, ranks in mismatch.sides:
        role = "culprit" if set(ranks) <= set(mismatch.odd) else "waiting"
        frames = frames_at(context.evidence, group, ranks[0], seq)
        sides.append(Side(role, ranks, f"called {call} as #{seq}", call, frames))
    return FlightFinding(
        kind=FindingKind.of_mismatch(mismatch.kind),
        group=group,
        seq=seq,
        op=mismatch.sides[0][0].op,
        culprits=mismatch.odd,
        confidence=0.95 if mismatch.clear else 0.6,
        sides=tuple(sides),
        hung=mismatch.live,
    )


def deadlocks(context: AnalysisContext) -> list[FlightFinding]:
    found = []
    for part in waiting.circles(context.waits):
        by_op: dict[Op, list[int]] = {}
        for rank in part:
            by_op.setdefault(context.waits.heads[rank], []).append(rank)
        if len(by_op) < 2 or _only_guessed(context, part):
            continue
        fewest = min(map(len, by_op.values()))
        odd = [ranks for ranks in by_op.values() if len(ranks) == fewest]
        culprits = odd[0] if len(odd) == 1 else part
        sides = [
            waiting_side(context, op, ranks, "culprit" if ranks[0] in culprits else "waiting")
            for op, ranks in by_op.items()
        ]
        first = context.waits.heads[part[0]]
        found.append(
            FlightFinding(
                kind=FindingKind.CROSS_GROUP_DEADLOCK,
                group=context.groups[first.group],
                seq=first.seq if first.peer is None else None,
                op=context.op_name(first, by_op[first]),
                culprits=tuple(sorted(culprits)),
                confidence=0.9,
                sides=tuple(sides),
                circle=waiting.a_circle(context.waits, part),
            )
        )
    return found


def _only_guessed(context: AnalysisContext, part: tuple[int, ...]) -> bool:
    """Whether a circle may come from taking ranks for members of groups that they are not in.

    A rank outside of it that all wait for, and that waits for no other rank, explains as much.
    """
    guessed = any(
        not context.groups[context.waits.heads[rank].group].members_known for rank in part
    )
    causes = waiting.roots(context.waits)
    return guessed and any(context.waits.edges[rank] & causes for rank in part)
