"""From hits to a verdict: which line is the cause, which lines only echo it.

The order of the rules is the order of the functions in ``judge``. They need no log and no
clock, only the hits and what the scan saw of the job's life.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ncclops.classify.model import (
    CERTAINTY,
    ELIGIBLE_POLICIES,
    Evidence,
    Hit,
    Report,
    Signature,
    Stamp,
    Stats,
    Verdict,
)
from ncclops.classify.stamps import comparable

_RESTART = "context-restart"
_FAILURE_SIGN = "context-failure-sign"
_COLLECTIVES_DONE = "context-collectives-completed"
_NCCL_VERSION = "context-nccl-version"
_MANY_LINES = 12
# Ranks that have lost a peer may print a few more steps; they do not print this many.
_RUN_OF_STEPS = 10
# Where a signature stands that says nothing but "it ended": below all that says why.
_LAST_TIER = 4
_COLLECTIVE_TIMEOUT = "watchdog-collective-timeout"
_LAST_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (\d+)")


@dataclass(slots=True)
class SourceLife:
    """What one source showed of the job being alive; lines are 1-based, None is never."""

    steps: int = 0
    first_step_line: int | None = None
    last_step_line: int | None = None
    last_step_stamp: Stamp | None = None
    last_init_line: int | None = None
    begun: bool = False
    ended: bool = False
    attempt: int = 0
    """The number in torchrun's ``attempt_<n>`` folder."""


@dataclass(slots=True)
class Observations:
    """All that a scan saw, in no particular order."""

    hits: list[Hit]
    lives: list[SourceLife]
    first_failed_rank: int | None = None
    # For stamps that name no year: the latest one that any line names.
    year: int = field(init=False)
    _axis: dict[int, tuple[float, int, int]] = field(init=False, default_factory=dict)

    def when(self, hit: Hit) -> tuple[float, int, int]:
        """Sort key: time where it is known; a line that nothing dates comes first."""
        return self._axis[hit.order]

    def __post_init__(self) -> None:
        years = [hit.stamp[0] for hit in self.hits if hit.stamp and hit.stamp[0]]
        self.year = max(years, default=2000)
        for hit in self.hits:
            at = comparable(hit.stamp, self.year) if hit.stamp else float("-inf")
            self._axis[hit.order] = (at, hit.source, hit.line)

    def step_follows(self, hit: Hit) -> bool:
        """Whether the job was seen to take a step after this line."""
        life = self.lives[hit.source]
        if (life.last_step_line or 0) > hit.line:
            return True
        if hit.stamp is None:
            return False
        at = comparable(hit.stamp, self.year)
        return any(
            comparable(other.last_step_stamp, self.year) > at
            for number, other in enumerate(self.lives)
            if number != hit.source and other.last_step_stamp
        )

    def run_follows(self, hit: Hit) -> bool:
        """Whether so many steps followed in the same log that nothing there can have died."""
        return self.lives[hit.source].steps - hit.steps_before >= _RUN_OF_STEPS

    def init_follows(self, hit: Hit) -> bool:
        return (self.lives[hit.source].last_init_line or 0) > hit.line

    def steps_were_seen(self, hit: Hit) -> bool:
        """Whether this log, or another one of the job, shows steps before the line."""
        others = (life for number, life in enumerate(self.lives) if number != hit.source)
        return hit.steps_before > 0 or any(life.steps for life in others)

    def step_precedes(self, hit: Hit) -> bool:
        """Whether the job may have run collectives before this line: yes when in doubt."""
        return self.steps_were_seen(hit) or any(
            other.signature.id == _COLLECTIVES_DONE for other in self.hits
        )


def judge(seen: Observations, stats: Stats, notes: tuple[str, ...] = ()) -> Report:
    """The verdict on what was seen, and the lines that prove it."""
    context = [hit for hit in seen.hits if hit.signature.role == "benign"]
    candidates = [hit for hit in seen.hits if hit.signature.role != "benign"]
    candidates = _conditions_met(candidates, seen)
    candidates = _not_recovered(candidates, context, seen)
    candidates = _explained_away(candidates)
    ordered = sorted(candidates, key=lambda hit: _rank_key(hit, candidates, seen))
    if not ordered:
        return Report(_without_failure(seen), (), stats, notes)
    leader = ordered[0]
    verdict = _verdict(leader, ordered, context, seen)
    return Report(verdict, tuple(_evidence(leader, ordered)), stats, notes)


def _conditions_met(hits: list[Hit], seen: Observations) -> list[Hit]:
    """Hits whose ``requires`` and ``absent`` hold."""
    by_id: dict[str, list[Hit]] = {}
    for hit in seen.hits:
        by_id.setdefault(hit.signature.id, []).append(hit)

    def fresh(fact: Hit, hit: Hit) -> bool:
        # A condition that the job has since outrun by a step no longer explains anything.
        return fact.source != hit.source or fact.steps_before >= hit.steps_before

    def holds(hit: Hit) -> bool:
        signature = hit.signature
        if any(name in by_id for name in signature.absent):
            return False
        facts = [fact for name in signature.requires for fact in by_id.get(name, ())]
        return not signature.requires or any(fresh(fact, hit) for fact in facts)

    return [hit for hit in hits if holds(hit)]


def _not_recovered(hits: list[Hit], context: list[Hit], seen: Observations) -> list[Hit]:
    """Without what the job got over: warnings it outlived, attempts that were followed by steps."""
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
    # Two that outrank each other leave nobody: then neither was explained.
    return kept or hits


def _rank_key(
    hit: Hit, hits: list[Hit], seen: Observations
) -> tuple[int, tuple[float, int, int], float]:
    signature = hit.signature
    tier = signature.tier
    if signature.teardown and _follows_other_failure(hit, hits, seen):
        tier = max(tier, _LAST_TIER)
    return tier, seen.when(hit), -CERTAINTY[signature.certainty]


def _follows_other_failure(hit: Hit, hits: list[Hit], seen: Observations) -> bool:
    """Whether the same process had something else to say before it crashed."""
    return any(
        other.source == hit.source
        and other.signature.tier < _LAST_TIER
        and other.signature.class_ != hit.signature.class_
        and (other.rank is None or hit.rank is None or other.rank == hit.rank)
        and seen.when(other) < seen.when(hit)
        for other in hits
    )


def _verdict(leader: Hit, ordered: list[Hit], context: list[Hit], seen: Observations) -> Verdict:
    signature = leader.signature
    policy, reason = _retry(leader, ordered, context, seen)
    rank, blamed = _culprit(leader, ordered, seen)
    return Verdict(
        class_=signature.class_,
        signature=signature.id,
        confidence=_confidence(leader, ordered),
        rank=rank,
        rank_began_it=blamed,
        phase=signature.phase,
        summary=signature.summary,
        retry_policy=policy,
        retry_reason=reason,
        remedy=signature.remedy,
    )


def _retry(
    leader: Hit, ordered: list[Hit], context: list[Hit], seen: Observations
) -> tuple[str, str]:
    """The policy, and why; every doubt goes against trying again."""
    signature = leader.signature
    if signature.retry not in ELIGIBLE_POLICIES and (
        signature.retry_after_progress not in ELIGIBLE_POLICIES
    ):
        return signature.retry, _REASONS[signature.retry]
    versions = {_nccl_version(hit.text) for hit in context if hit.signature.id == _NCCL_VERSION}
    if len(versions - {""}) > 1 and signature.class_ == "bootstrap":
        named = ", ".join(sorted(versions - {""}))
        return "fix-config", f"ranks run different NCCL versions ({named}), which no retry mends"
    progressed = seen.step_precedes(leader)
    if signature.retry_after_progress in ELIGIBLE_POLICIES:
        # Here progress argues for a retry, and so it must have been seen.
        progressed = seen.steps_were_seen(leader)
    if progressed:
        policy = signature.retry_after_progress
        return policy, f"collectives had already completed: {_REASONS[policy]}"
    blocking = _needs_a_fix(leader, ordered)
    if blocking is not None and signature.retry in ELIGIBLE_POLICIES:
        return (
            "none",
            f"{blocking.signature.id} in {blocking.file}:{blocking.line} speaks against it",
        )
    return signature.retry, _REASONS[signature.retry]


def _needs_a_fix(leader: Hit, ordered: list[Hit]) -> Hit | None:
    """Another cause that is as firm as the leader and that no retry would mend."""
    return next(
        (
            hit
            for hit in ordered
            if hit.signature.role == "cause"
            and hit.signature.tier <= max(1, leader.signature.tier)
            and hit.signature.retry in ("fix-config", "fix-code")
            and hit.signature.class_ != leader.signature.class_
            and not hit.signature.teardown
        ),
        None,
    )


_REASONS = {
    "retry-once-lazy": "a failure to start, before the first collective: a second try may pass",
    "retry-after-cooldown": "the condition passes with time",
    "replace-node": "the hardware failed; the job can run on another node",
    "fix-config": "the same configuration fails again",
    "fix-code": "the same program fails again",
    "none": "nothing shows that another attempt would end otherwise",
}


def _nccl_version(text: str) -> str:
    _, _, rest = text.partition("NCCL version ")
    return rest.split("+")[0].split()[0] if rest.strip() else ""


def _confidence(leader: Hit, ordered: list[Hit]) -> float:
    signature = leader.signature
    confidence = CERTAINTY[signature.certainty]
    if signature.tier >= 2:
        confidence *= 0.8 if signature.role == "symptom" else 0.6
    rivals = {
        hit.signature.class_
        for hit in ordered
        if hit.signature.tier == signature.tier and hit.signature.role == signature.role
    } - {signature.class_}
    return confidence * (0.85 if rivals else 1.0)


def _culprit(leader: Hit, ordered: list[Hit], seen: Observations) -> tuple[int | None, bool]:
    """(rank, whether it began the failure rather than reported it first)."""
    signature = leader.signature
    same = [hit for hit in ordered if hit.signature.id == signature.id]
    if signature.id == _COLLECTIVE_TIMEOUT and (behind := _rank_behind(same)) is not None:
        return behind, True
    rank = next((hit.rank for hit in same if hit.rank is not None), None)
    if rank is None and seen.first_failed_rank is not None:
        return seen.first_failed_rank, True
    return rank, rank is not None and (signature.role == "cause" or leader.accuses)


def _rank_behind(timeouts: list[Hit]) -> int | None:
    """The rank whose last enqueued work is lower than that of all others, as torch prints it."""
    enqueued: dict[int, int] = {}
    for hit in timeouts:
        if hit.rank is not None and (found := _LAST_ENQUEUED.search(hit.text)):
            enqueued[hit.rank] = int(found[1])
    lowest = sorted(enqueued.items(), key=lambda item: item[1])[:2]
    if len(lowest) < 2 or lowest[0][1] == lowest[1][1]:
        return None
    return lowest[0][0]


def _evidence(leader: Hit, ordered: list[Hit]) -> Iterable[Evidence]:
    """The leading line, other lines of the same cause, then symptoms and victims."""
    shown: dict[str, list[Hit]] = {"cause": [], "symptom": [], "victim": []}
    lines: set[tuple[str, int]] = set()
    for hit in ordered:
        if (hit.file, hit.line) not in lines:
            shown[_role_beside(hit, leader)].append(hit)
            lines.add((hit.file, hit.line))
    for role, hits in shown.items():
        for hit in _spread(hits):
            yield Evidence(hit.file, hit.line, hit.text, hit.signature.id, role, hit.rank)


def _role_beside(hit: Hit, leader: Hit) -> str:
    """A leader is shown as the cause, whatever its signature thinks of itself; rivals step back."""
    same = hit.signature.class_ == leader.signature.class_
    if hit is leader or (same and hit.signature.role == "cause"):
        return "cause"
    return "symptom" if hit.signature.role == "cause" else hit.signature.role


def _spread(hits: list[Hit]) -> list[Hit]:
    """A handful of lines that show as many signatures and ranks as possible."""
    seen: set[tuple[Signature, int | None]] = set()
    first: list[Hit] = []
    again: list[Hit] = []
    for hit in hits:
        key = (hit.signature, hit.rank)
        (again if key in seen else first).append(hit)
        seen.add(key)
    return (first + again)[:_MANY_LINES]


def _without_failure(seen: Observations) -> Verdict:
    """Healthy needs a sign of life after the last sign of trouble; silence is ``unknown``."""
    lives = seen.lives
    signs = [hit for hit in seen.hits if hit.signature.id == _FAILURE_SIGN]
    if any(not seen.step_follows(hit) for hit in signs):
        return _unknown("something failed in a way that no signature knows")
    if any(life.ended for life in lives) or sum(life.steps for life in lives) > 1:
        return _healthy(0.9, "the job took steps and nothing failed")
    if any(life.steps or life.last_init_line for life in lives):
        return _healthy(0.6, "communicators came up and nothing failed; no run of steps is shown")
    if any(life.begun for life in lives):
        return _healthy(0.4, "NCCL began to start and nothing failed so far; the log ends there")
    return _unknown("no known failure and no sign of a running job")


def _healthy(confidence: float, summary: str) -> Verdict:
    return Verdict(class_="healthy", confidence=confidence, summary=summary)


def _unknown(summary: str) -> Verdict:
    return Verdict(
        class_="unknown",
        confidence=0.0,
        summary=summary,
        retry_reason="an unknown failure is not retried",
        remedy=(
            "classify the whole log of every rank: pass the directory, not one file",
            "run again with NCCL_DEBUG=WARN and TORCH_CPP_LOG_LEVEL=INFO",
        ),
    )
