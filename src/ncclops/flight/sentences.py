"""A finding in one sentence: which rank, what, in which group, where in the user's code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ncclops.flight.absences import doing
from ncclops.flight.analysis_context import FlightFinding
from ncclops.flight.finding_kinds import FindingKind
from ncclops.flight.model import FlightEvidence
from ncclops.rank_lists import ranks_named
from ncclops.stacks.frame import Frame

_SHOWN_PLACES = 4


def sentence(evidence: FlightEvidence, finding: FlightFinding) -> str:
    """``finding`` in one sentence."""
    if finding.kind == FindingKind.RANK_DIED:
        return _died(evidence, finding)
    called = any(side.call for side in finding.sides if side.role == "culprit")
    if finding.kind == FindingKind.NEVER_ARRIVED or (
        finding.kind == FindingKind.OP_MISMATCH and not called
    ):
        return f"{ranks_named(finding.culprits)} never entered {_what(finding)}: " + _where(
            evidence, finding
        )
    if not called and finding.kind.is_mismatch and finding.kind != FindingKind.ROOT_MISMATCH:
        return (
            f"{ranks_named(finding.culprits)} asked for another shape or type in {_what(finding)}: "
            + (_where(evidence, finding))
        )
    return _TELL.get(finding.kind, _mismatch)(finding)


def _what(finding: FlightFinding) -> str:
    number = f" #{finding.seq}" if finding.seq is not None else ""
    group = f" of group {finding.group}" if finding.group is not None else ""
    return f"{finding.op}{number}{group}"


def _at(frame: Frame | None) -> str:
    return f" in {frame.short}" if frame is not None else ""


def _where(evidence: FlightEvidence, finding: FlightFinding) -> str:
    by_place: dict[str, list[int]] = {}
    for rank in finding.culprits:
        by_place.setdefault(doing(evidence, rank), []).append(rank)
    if len(by_place) == 1:
        return doing(evidence, finding.culprits[0], several=len(finding.culprits) > 1)
    parts = [
        f"{ranks_named(ranks)}: {words}" for words, ranks in list(by_place.items())[:_SHOWN_PLACES]
    ]
    more = len(by_place) - _SHOWN_PLACES
    return "; ".join(parts) + (f"; and {more} more places" if more > 0 else "")


def _died(evidence: FlightEvidence, finding: FlightFinding) -> str:
    waiting = [rank for side in finding.sides if side.role == "waiting" for rank in side.ranks]
    known = [about for rank in finding.culprits if (about := evidence.ranks.get(rank)) is not None]
    sure = bool(known) and all(about.ended for about in known)
    verb = "died" if sure else ("is missing" if len(finding.culprits) == 1 else "are missing")
    said = f"{ranks_named(finding.culprits)} {verb} ({_where(evidence, finding)})"
    if not waiting or finding.op is None:
        return said
    return f"{said}; {ranks_named(waiting)} had entered {_what(finding)}"


def _mismatch(finding: FlightFinding) -> str:
    usual, *odd = finding.sides
    parts = [f"{ranks_named(s.ranks)} called {s.call}{_at(s.frame)}" for s in odd[:_SHOWN_PLACES]]
    return (
        f"{' and '.join(parts)} as #{finding.seq} of group {finding.group}, "
        f"where {ranks_named(usual.ranks)} called {usual.call}{_at(usual.frame)}"
        + ("" if finding.hung else "; the job went on after it")
    )


def _deadlock(finding: FlightFinding) -> str:
    side_of = {rank: side for side in finding.sides for rank in side.ranks}
    way = [*finding.circle, *finding.circle[:1]]
    parts = [
        f"rank {rank} is {side_of[rank].doing}{_at(side_of[rank].frame)} and waits for rank {after}"
        for rank, after in pairwise(way[: _SHOWN_PLACES + 1])
    ]
    everyone = tuple(sorted(side_of))
    return f"{ranks_named(everyone)} wait for each other in a circle: {'; '.join(parts)}"


def _stalled(finding: FlightFinding) -> str:
    first, *left = finding.sides
    if finding.group is None:
        verb = "does" if len(first.ranks) == 1 else "do"
        return f"{ranks_named(first.ranks)} {verb} not get out of {finding.op}{_at(first.frame)}"
    if left:
        return (
            f"{ranks_named(first.ranks)} entered {_what(finding)} and did not get out of it, "
            f"unlike {ranks_named(left[0].ranks)}: the transfer stalls{_at(first.frame)}"
        )
    said = f"all ranks entered {_what(finding)}, alike, and it does not end: the transfer stalls"
    if finding.culprits:
        said += f"; {ranks_named(finding.culprits)} did not start it on the device"
    return said + _at(first.frame)


def _root(finding: FlightFinding) -> str:
    first, *rest = finding.sides
    left = f", which {ranks_named(rest[0].ranks)} left" if rest else ""
    return (
        f"{ranks_named(first.ranks)} did not get out of {_what(finding)}{left}: ranks disagree "
        f"about the root, most likely{_at(first.frame)}"
    )


def _extra(finding: FlightFinding) -> str:
    first = finding.sides[0]
    absent = tuple(rank for side in finding.sides[1:] for rank in side.ranks)
    return (
        f"only {ranks_named(first.ranks)} entered {_what(finding)}{_at(first.frame)}: "
        f"{ranks_named(absent)} had finished"
    )


_TELL: dict[FindingKind, Callable[[FlightFinding], str]] = {
    FindingKind.CROSS_GROUP_DEADLOCK: _deadlock,
    FindingKind.STALLED: _stalled,
    FindingKind.ROOT_MISMATCH: _root,
    FindingKind.EXTRA_CALL: _extra,
}
