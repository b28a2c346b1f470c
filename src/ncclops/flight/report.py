"""From a folder to a report, and from a report to a sentence and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from ncclops.flight import ras, torch_opinion
from ncclops.flight.analysis_context import FlightFinding, Side
from ncclops.flight.disagreements import CallComparison
from ncclops.flight.findings import find
from ncclops.flight.groups import Group, add_possible_members, align
from ncclops.flight.model import FlightEvidence
from ncclops.flight.sentences import sentence
from ncclops.flight.sources import gather
from ncclops.flight.waits import Waits, find_waits
from ncclops.given_path import given_path
from ncclops.rank_lists import ranks_named

SCHEMA = "ncclops.flight/1"


@dataclass
class FlightReport:
    """What the recorders and stacks of a job show. ``findings`` has the verdict's first."""

    evidence: FlightEvidence
    groups: list[Group]
    waits: Waits
    findings: list[FlightFinding]
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        return bool(self.findings)

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if not self.findings:
            return self._nothing_wrong()
        return self.sentence_of(self.findings[0])

    def sentence_of(self, finding: FlightFinding) -> str:
        """One of the findings in a sentence."""
        return sentence(self.evidence, finding)

    def _nothing_wrong(self) -> str:
        records = sum(about.record is not None for about in self.evidence.ranks.values())
        said = f"nothing wrong found in what {records} rank{'s' * (records != 1)} recorded"
        if self.waits.late:
            rank, late = max(self.waits.late.items(), key=lambda item: item[1])
            if late > 0:
                return f"{said}: rank {rank} was {late:.1f} s behind, which is not yet a hang"
        return said

    def to_json(self) -> dict[str, Any]:
        """The document ``ncclops.flight/1``."""
        first = self.findings[0] if self.findings else None
        return {
            "schema": SCHEMA,
            "source": self.evidence.source,
            "verdict": {
                "kind": first.kind if first else "none",
                "sentence": self.sentence,
                "culprits": list(first.culprits) if first else [],
                "group": str(first.group.name) if first and first.group else None,
                "seq": first.seq if first else None,
                "op": first.op if first else None,
                "frame": _culprit_frame(first),
                "confidence": first.confidence if first else 1.0,
                "hung": bool(first and first.hung),
            },
            "findings": [self._finding_json(finding) for finding in self.findings],
            "groups": [self.group_json(group) for group in self.groups],
            "ranks": [self._rank_json(rank) for rank in sorted(self.evidence.ranks)],
            "skipped": [{"file": f, "reason": r} for f, r in self.evidence.skipped],
            "notes": self.notes,
            **self.extra,
        }

    def _finding_json(self, finding: FlightFinding) -> dict[str, Any]:
        return {
            "kind": finding.kind,
            "sentence": sentence(self.evidence, finding),
            "culprits": list(finding.culprits),
            "hosts": {
                str(rank): about.record.host
                for rank in finding.culprits
                if (about := self.evidence.ranks.get(rank)) and about.record and about.record.host
            },
            "group": str(finding.group.name) if finding.group else None,
            "group_ranks": list(finding.group.members) if finding.group else [],
            "seq": finding.seq,
            "op": finding.op,
            "confidence": finding.confidence,
            "hung": finding.hung,
            "circle": list(finding.circle),
            "sides": [_side_json(side) for side in finding.sides],
        }

    def group_json(self, group: Group) -> dict[str, Any]:
        """One group's row: who has entered its last collective and who has not."""
        newest = max(group.last.values(), default=0)
        entered = sorted(rank for rank, last in group.last.items() if last == newest and newest)
        behind = sorted(rank for rank, last in group.last.items() if last < newest)
        call = group.call(self.evidence, entered[0], newest) if entered else None
        index = self.groups.index(group)
        return {
            "name": group.name.name,
            "desc": group.name.desc,
            "backend": group.name.backend,
            "ranks": list(group.members),
            "ranks_inferred": not group.members_known,
            "last_seq": newest,
            "last_op": call.op if call else None,
            "entered": entered,
            "not_entered": behind,
            "unknown": sorted(set(group.members) - set(group.last)),
            "pending": sorted(r for r, op in self.waits.heads.items() if op.group == index),
            "first_behind": first_behind(group),
        }

    def _rank_json(self, rank: int) -> dict[str, Any]:
        about = self.evidence.ranks[rank]
        record, place = about.record, about.place
        head = self.waits.heads.get(rank)
        return {
            "rank": rank,
            "file": record.file if record else None,
            "version": record.version if record else None,
            "host": record.host if record else None,
            "entries": record.entries if record else 0,
            "waiting_in": None if head is None else str(self.groups[head.group].name),
            "waiting_for": sorted(self.waits.edges.get(rank, ())),
            "inside": place.inside if place else None,
            "frame": place.frame.to_json() if place and place.frame else None,
            "ended": about.ended,
            "missing": about.missing,
        }


def analyze(
    path: str | PathLike[str],
    pattern: str | None = None,
    *,
    ras_address: str | None = None,
    with_torch: bool = False,
) -> FlightReport:
    """Read ``path`` and say what is wrong; see :func:`ncclops.flight.sources.gather`.

    ``pattern`` (as in a shell) keeps groups whose name or description matches. ``ras_address``
    (HOST:PORT) has NCCL's RAS service of the running job asked; an answer saved in ``path`` as
    ras.json or ras.txt is read anyway. ``with_torch`` has torch's analyser asked, in a process of
    its own. ``UsageError`` if nothing can be read or no group matches.
    """
    evidence = gather(given_path(path, "a run, an incident, or a folder of dumps"))
    view = ras.find_view(evidence, ras_address)
    report = judge(evidence, pattern)
    if view is not None:
        report.extra["ras"] = view.to_json()
    if with_torch:
        report.extra["torch"] = torch_opinion.analyse(evidence, report.groups)
    return report


def judge(evidence: FlightEvidence, pattern: str | None = None) -> FlightReport:
    """What is wrong according to ``evidence``. Pure."""
    groups = align(evidence)
    if pattern is not None:
        groups = _matching(groups, pattern)
    comparison = CallComparison(evidence)
    mismatches = [found for group in groups if (found := comparison.first_mismatch(group))]
    waits = find_waits(evidence, groups)
    disagreeing = {id(mismatch.group) for mismatch in mismatches if mismatch.live}
    guessed = [
        add_possible_members(groups[index], evidence)
        for index in _without_cause(waits)
        if id(groups[index]) not in disagreeing
    ]
    if any(guessed):
        waits = find_waits(evidence, groups)
    findings = find(evidence, groups, waits, mismatches)
    return FlightReport(evidence, groups, waits, findings, notes=_notes(evidence, groups))


def _without_cause(waits: Waits) -> set[int]:
    """Groups in which ranks wait, and for no rank that is known."""
    return {op.group for rank, op in waits.heads.items() if not waits.edges[rank]}


def _matching(groups: list[Group], pattern: str) -> list[Group]:
    from fnmatch import fnmatch

    from ncclops.errors import UsageError

    found = [g for g in groups if fnmatch(g.name.name, pattern) or fnmatch(g.name.desc, pattern)]
    if not found:
        names = ", ".join(sorted({str(group.name) for group in groups})[:8]) or "none"
        raise UsageError(f"no group matches {pattern!r}: there are {names}")
    return found


def _notes(evidence: FlightEvidence, groups: list[Group]) -> list[str]:
    notes = list(evidence.notes)
    records = [about for about in evidence.ranks.values() if about.record is not None]
    absent = {rank for group in groups for rank in group.members} - {r.rank for r in records}
    if absent:
        notes.append(f"no dump of {ranks_named(sorted(absent))}")
    empty = [about.rank for about in records if about.record and not about.record.entries]
    if empty:
        notes.append(
            f"the dump of {ranks_named(empty)} is empty: torch 2.7 to 2.10 record nothing "
            "unless TORCH_FR_BUFFER_SIZE (in 2.7 TORCH_NCCL_TRACE_BUFFER_SIZE) is set"
        )
    inferred = [str(group.name) for group in groups if not group.members_known]
    if inferred:
        notes.append(
            f"the members of {', '.join(sorted(inferred)[:4])} are those who recorded something: "
            "Gloo's recorder does not know them"
        )
    return notes


def first_behind(group: Group) -> int | None:
    """The member that fell behind first: with the lowest count, and silent for longest."""
    newest = max(group.last.values(), default=0)
    behind = [rank for rank, last in group.last.items() if last < newest]

    def since(rank: int) -> tuple[int, int]:
        track = group.tracks.get(rank)
        silent = track.created_ns[-1] if track is not None and track.seqs else 0
        return group.last[rank], silent

    return min(behind, key=since, default=None)


def _culprit_frame(finding: FlightFinding | None) -> dict[str, Any] | None:
    """The culprit's line; of one that left none, where the others stand in the same operation."""
    sides = finding.sides if finding is not None else ()
    for side in sorted(sides, key=lambda side: side.role != "culprit"):
        if side.frame is not None:
            return side.frame.to_json()
    return None


def _side_json(side: Side) -> dict[str, Any]:
    return {
        "role": side.role,
        "ranks": list(side.ranks),
        "doing": side.doing,
        "call": side.call.to_json() if side.call else None,
        "frame": side.frame.to_json() if side.frame else None,
        "frames": [frame.to_json() for frame in side.frames],
    }
