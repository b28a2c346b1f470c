"""Which line is the cause, and which ones only follow from it.

The order of the rules is the order of the functions in ``judge``. They need no log and no
clock, only the hits and what the scan saw of the job's life.
"""

from __future__ import annotations

from ncclops.classify.model import EXITS, Hit, Report, Stats
from ncclops.classify.observations import COLLECTIVES_DONE, Observations
from ncclops.classify.operations import disagreeing
from ncclops.classify.verdicts import (
    evidence_for,
    explained,
    harmless_warnings,
    nothing_read,
    verdict_on,
    verdict_without_failure,
)

_RESTART = "context-restart"
_INIT_PHASE = "context-init-phase"
# Ids of signatures of NCCL's traces, `NCCL INFO misc/x.cc:64 -> 3`.
_TRACES = "nccl-trace-"
# Signatures of a launcher's word that a process ended with a code of its own: of one that had
# trained to the end, too, the job has failed.
_FAILED_TASKS = ("elastic-exit-1", "srun-task-failed")
# The tier of a signature that says only that a process ended: below all that say why. What has
# a tier beyond it is no failure: it says how the job ran.
_LAST_TIER = 4
# By how much the clocks of hosts may differ. A rank that waited for others had waited for long when
# it gave up: what failed on another one just after that by its clock was there before.
_CLOCKS_DIFFER_S = 120.0


def judge(seen: Observations, stats: Stats, notes: tuple[str, ...] = ()) -> Report:
    """The verdict on what was seen, and the lines that prove it."""
    context = [hit for hit in seen.hits if hit.signature.role == "benign"]
    candidates = [hit for hit in seen.hits if hit.signature.role != "benign"]
    candidates = _conditions_met(candidates, seen)
    candidates = _not_recovered(candidates, context, seen)
    candidates = _explained_away(candidates)
    consequences = _crashes_of_teardown(candidates, seen) | _echoes(candidates, seen)
    ordered = sorted(candidates, key=lambda hit: _rank_key(hit, consequences, seen))
    if not ordered:
        verdict = nothing_read() if seen.is_empty else verdict_without_failure(seen)
        if verdict.shows_failure:
            return Report(verdict, (), stats, notes)
        lines, why = explained(harmless_warnings(seen))
        return Report(verdict, lines, stats, notes + why)
    leader = ordered[0]
    verdict = verdict_on(leader, ordered, context, seen)
    return Report(verdict, tuple(evidence_for(leader, ordered)), stats, notes)


def _conditions_met(hits: list[Hit], seen: Observations) -> list[Hit]:
    """Hits whose ``requires``, ``requires_all``, ``absent`` and ``compares`` hold."""
    # By signature and source: how many steps came before the last of the hits that still count.
    by_id: dict[str, dict[int, int]] = {}
    for hit in seen.hits:
        # What has begun and is done explains nothing.
        if hit.signature.cleared_by != "init" or not seen.init_follows(hit):
            sources = by_id.setdefault(hit.signature.id, {})
            sources[hit.source] = max(hit.steps_before, sources.get(hit.source, 0))
    if seen.starting_up:
        by_id.pop(COLLECTIVES_DONE, None)

    odd = disagreeing(hit for hit in hits if hit.signature.compares)

    def seen_before(name: str, hit: Hit) -> bool:
        sources = by_id.get(name, {})
        if len(sources) > (hit.source in sources):
            return True
        # Nor does what the job has since outrun by a step.
        return sources.get(hit.source, -1) >= hit.steps_before

    def holds(hit: Hit) -> bool:
        signature = hit.signature
        if any(name in by_id for name in signature.absent):
            return False
        if signature.compares and hit.order not in odd:
            return False
        if seen.starting_up and _INIT_PHASE in signature.requires:
            return True
        if not all(seen_before(name, hit) for name in signature.requires_all):
            return False
        return not signature.requires or any(seen_before(n, hit) for n in signature.requires)

    return [hit for hit in hits if holds(hit)]


def _not_recovered(hits: list[Hit], context: list[Hit], seen: Observations) -> list[Hit]:
    """Without what the job recovered from: harmless warnings, attempts followed by steps."""
    restarts = (h for h in context if h.signature.id == _RESTART and seen.step_follows(h))
    last_restart = max(restarts, key=seen.when, default=None)
    running = max((life.attempt for life in seen.lives if life.steps), default=0)
    last_lines: dict[int, int] = {}
    for hit in hits:
        last_lines[hit.source] = max(hit.line, last_lines.get(hit.source, 0))

    def recovered(hit: Hit) -> bool:
        cleared_by = hit.signature.cleared_by
        if seen.lives[hit.source].attempt < running:
            return True
        if cleared_by == "never":
            return False
        if seen.begun_again_after(hit) or seen.went_on_to_its_end(hit, last_lines[hit.source]):
            return True
        of_teardown = hit.signature.id not in _FAILED_TASKS and (
            hit.signature.role == "victim" or hit.signature.id.startswith(_TRACES)
        )
        if of_teardown and seen.follows_the_end(hit):
            return True
        if (cleared_by and seen.step_follows(hit)) or seen.run_follows(hit):
            return True
        if cleared_by == "init" and seen.init_follows(hit):
            return True
        return last_restart is not None and (
            seen.when(hit) < seen.when(last_restart)
            or (hit.source, hit.line) == (last_restart.source, last_restart.line)
        )

    return [hit for hit in hits if not recovered(hit)]


def _explained_away(hits: list[Hit]) -> list[Hit]:
    """Without signatures that another one present outranks."""
    present = {hit.signature.id: hit.signature for hit in hits}.values()
    outranked = {
        loser.id for winner in present for loser in present if winner.outranks_signature(loser)
    }
    kept = [hit for hit in hits if hit.signature.id not in outranked]
    # Two that outrank each other would leave none: then neither was explained.
    return kept or hits


def _rank_key(
    hit: Hit, consequences: set[int], seen: Observations
) -> tuple[int, tuple[float, int]]:
    tier = hit.signature.tier
    at, order = seen.when(hit)
    if tier == 1 and (
        hit.signature.role == "symptom" or hit.signature.class_ == "store-rendezvous"
    ):
        at += _CLOCKS_DIFFER_S
    return max(tier, _LAST_TIER) if hit.order in consequences else tier, (at, order)


def _echoes(hits: list[Hit], seen: Observations) -> set[int]:
    """The orders of hits that a signature which they are an echo of came before."""
    first: dict[str, tuple[float, int]] = {}
    for hit in sorted(hits, key=seen.when):
        first.setdefault(hit.signature.id, seen.when(hit))
    return {
        hit.order
        for hit in hits
        if any(first[name] < seen.when(hit) for name in hit.signature.echo_of & first.keys())
    }


def _crashes_of_teardown(hits: list[Hit], seen: Observations) -> set[int]:
    """The orders of hits whose process showed another failure before it ended.

    What start-up alone would clear is a warning, and explains no crash.
    """
    # By source (or all together) and rank (or all together): the first of each class.
    firsts: dict[tuple[int | str, int | str | None], dict[str, tuple[float, int]]] = {}
    for hit in hits:
        if hit.signature.tier < _LAST_TIER and hit.signature.cleared_by != "init":
            for place in ((hit.source, hit.rank), (hit.source, "all"), ("all", hit.rank)):
                first = firsts.setdefault(place, {})
                name, when = hit.signature.class_, seen.when(hit)
                first[name] = min(when, first.get(name, when))

    def follows(hit: Hit) -> bool:
        if hit.file == EXITS:  # whatever its log shows was before
            others = firsts.get(("all", hit.rank), {})
            return any(name != hit.signature.class_ for name in others)
        # A line that names no rank may be of any.
        ranks = ("all",) if hit.rank is None else (hit.rank, None)
        return any(
            name != hit.signature.class_ and first < seen.when(hit)
            for rank in ranks
            for name, first in firsts.get((hit.source, rank), {}).items()
        )

    return {hit.order for hit in hits if hit.signature.teardown and follows(hit)}
