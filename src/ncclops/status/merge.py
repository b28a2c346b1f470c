"""The status of a run on several nodes, from each agent's status of its own ranks.

Each node's status (``reading.RunReader.own``) goes through the job's store to the first node
(``cluster.statuses``). There the newest of each is in ``<run>/control/nodes.json`` (:func:`save`),
where the agent's server and all other readers find them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ncclops.record.documents import read_list, write_document
from ncclops.record.paths import RunPaths
from ncclops.status import compare
from ncclops.status.event_facts import SEEN_BY_ALL
from ncclops.status.model import RankStatus, RunPhase, RunStatus, from_json

# An agent sends every few seconds; without a status for so long, its state is unknown.
_SILENT_S = 60.0


def merge(statuses: Sequence[RunStatus]) -> RunStatus:
    """One status of all nodes. The first, that of node 0, speaks for the run.

    Of a rank that several report (it moved to a spare), the newest holds. Faults are each node's
    own and are added up, but for those that all see; restarts are the job's: the node with the
    highest count has missed none.
    """
    first, *others = statuses
    if not others:
        return first
    ranks: dict[int, tuple[float, RankStatus]] = {}
    for status in statuses:
        for rank in status.ranks:
            if rank.rank not in ranks or ranks[rank.rank][0] < status.as_of:
                ranks[rank.rank] = (status.as_of, _as_of(first, status, rank))
    together = tuple(ranks[rank][1] for rank in sorted(ranks))
    faults = sum((Counter(status.faults) for status in statuses), Counter[str]())
    for kind in faults.keys() & SEEN_BY_ALL:
        faults[kind] = max(status.faults.get(kind, 0) for status in statuses)
    known = [status.last_fault for status in statuses if status.last_fault is not None]
    merged = compare.compared(
        replace(
            first,
            phase=_phase(first, others, together),
            notes=(*first.notes, *_silent(first, others)),
            nodes=tuple(dict.fromkeys(node for status in statuses for node in status.nodes)),
            iteration=max(status.iteration for status in statuses),
            restarts=max(status.restarts for status in statuses),
            ranks=together,
            faults=dict(faults),
            last_fault=max(known, key=lambda fault: fault.ts, default=None),
        )
    )
    # Chronic ones are known to their own node's watch, which has compared all nodes.
    slow = {
        each.rank: each
        for status in statuses
        for each in status.stragglers
        if each.kind == "chronic"
    }
    slow |= {each.rank: each for each in merged.stragglers}
    return replace(merged, stragglers=tuple(sorted(slow.values(), key=lambda each: -each.ratio)))


def save(run_dir: Path, others: Iterable[RunStatus]) -> None:
    """Keep what other nodes have sent, the newest of each. Raises ``OSError``."""
    # A reader finds the old list or the new one.
    write_document(RunPaths(run_dir).nodes_status, [status.to_json() for status in others])


def load(run_dir: Path) -> list[RunStatus]:
    """What :func:`save` has kept, as far as it can be read."""
    found = []
    for document in read_list(RunPaths(run_dir).nodes_status):
        with suppress(ValueError):
            found.append(from_json(document))
    return found


def _phase(first: RunStatus, others: Sequence[RunStatus], ranks: Sequence[RankStatus]) -> RunPhase:
    """A fault anywhere is the phase of the run; else it is as far as its last rank."""
    usual = ("starting", "warming-up", "training", "running")
    if first.phase not in usual:
        return first.phase
    amiss = [other.phase for other in others if other.phase in ("restarting", "stopping")]
    return amiss[0] if amiss else compare.run_phase(ranks)


def _silent(first: RunStatus, others: Sequence[RunStatus]) -> list[str]:
    if first.phase == "ended":
        return []
    return [
        f"{' '.join(other.nodes) or 'a node'}: last status {first.as_of - other.as_of:.0f} s ago"
        for other in others
        if first.as_of - other.as_of > _SILENT_S
    ]


def _as_of(first: RunStatus, status: RunStatus, rank: RankStatus) -> RankStatus:
    """``rank``, which ``status`` has, at the time of ``first``."""
    by_s = first.as_of - status.as_of
    over = first.phase == "ended" and status is not first and rank.phase != "failed"
    return replace(
        rank,
        phase="ended" if over else rank.phase,
        step_age_s=_later(rank.step_age_s, by_s),
        heartbeat_age_s=_later(rank.heartbeat_age_s, by_s),
    )


def _later(age_s: float | None, by_s: float) -> float | None:
    return None if age_s is None else round(age_s + max(0.0, by_s), 3)
