"""Which line is the cause, and which ones only follow from it.

The order of the rules is the order of the functions in ``judge``. They need no log and no
clock, only the hits and what the scan saw of the job's life.
"""

from __future__ import annotations

from ncclops.classify.model import Hit, Report, Stats
from ncclops.classify.observations import COLLECTIVES_DONE, Observations
from ncclops.classify.verdicts import (
    evidence_for,
    nothing_read,
    verdict_on,
    verdict_without_failure,
)

_RESTART = "context-restart"
_INIT_PHASE = "context-init-phase"
# The tier of a signature that says only that a process ended: below all that say why.
_LAST_TIER = 4


def judge(seen: Observations, stats: Stats, notes: tuple[str, ...] = ()) -> Report:
    """The verdict on what was seen, and the lines that prove it."""
    context = [hit for hit in seen.hits if hit.signature.role == "benign"]
    candidates = [hit for hit in seen.hits if hit.signature.role != "benign"]
    candidates = _conditions_met(candidates, seen)
    candidates = _not_recovered(candidates, context, seen)
    candidates = _explained_away(candidates)
    crashes = _crashes_of_teardown(candidates, seen)
    ordered = sorted(candidates, key=lambda hit: _rank_key(hit, crashes, seen))
    if not ordered:
        verdict = nothing_read() if seen.is_empty else verdict_without_failure(seen)
        return Report(verdict, (), stats, notes)
    leader = ordered[0]
    verdict = verdict_on(leader, ordered, context, seen)
    return Report(verdict, tuple(evidence_for(leader, ordered)), stats, notes)


def _conditions_met(hits: list[Hit], seen: Observations) -> list[Hit]:
    """Hits whose ``requires`` and ``absent`` hold."""
    by_id: dict[str, list[Hit]] = {}
    for hit in seen.hits:
        by_id.setdefault(hit.signature.id, []).append(hit)
    if seen.starting_up:
        by_id.pop(COLLECTIVES_DONE, None)

    def fresh(fact: Hit, hit: Hit) -> bool:
        # A condition that the job has since outrun by a step no longer explains anything.
        return fact.source != hit.source or fact.steps_before >= hit.steps_before

    def holds(hit: Hit) -> bool:
        signature = hit.signature
        if any(name in by_id for name in signature.absent):
            return False
        if seen.starting_up and _INIT_PHASE in signature.requires:
            return True
        facts = [fact for name in signature.requires for fact in by_id.get(name, ())]
        return not signature.requires or any(fresh(fact, hit) for fact in facts)

    return [hit for hit in hits if holds(hit)]


def _not_recovered(hits: list[Hit], context: list[Hit], seen: Observations) -> list[Hit]:
    """Without what the job recovered from: harmless warnings, attempts followed by steps."""
    restarts = [hit for hit in context if hit.signature.id == _RESTART]
    running = max((life.attempt for life in seen.lives if life.steps), default=0)

    def recovered(hit: Hit) -> bool:
        cleared_by = hit.signature.cleared_by
        if seen.lives[hit.source].attempt < running:
            return True
        if cleared_by == "never":
            return False
        if (cleared_by and seen.step_follows(hit)) or seen.run_follows(hit):
            return True
        if cleared_by == "init" and seen.init_follows(hit):
            return True
        return any(
            seen.when(hit) < seen.when(restart) and seen.step_follows(restart)
            for restart in restarts
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


def _rank_key(hit: Hit, crashes: set[int], seen: Observations) -> tuple[int, tuple[float, int]]:
    tier = hit.signature.tier
    return max(tier, _LAST_TIER) if hit.order in crashes else tier, seen.when(hit)


def _crashes_of_teardown(hits: list[Hit], seen: Observations) -> set[int]:
    """The orders of hits whose process showed another failure before it ended.

    What start-up alone would clear is a warning, and explains no crash.
    """
    by_source: dict[int, list[Hit]] = {}
    for hit in hits:
        if hit.signature.tier < _LAST_TIER and hit.signature.cleared_by != "init":
            by_source.setdefault(hit.source, []).append(hit)

    def follows(hit: Hit) -> bool:
        return any(
            other.signature.class_ != hit.signature.class_
            and (other.rank is None or hit.rank is None or other.rank == hit.rank)
            and seen.when(other) < seen.when(hit)
            for other in by_source.get(hit.source, ())
        )

    return {hit.order for hit in hits if hit.signature.teardown and follows(hit)}
