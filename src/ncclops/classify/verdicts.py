"""From the leading line to the verdict: rank, confidence, retry, evidence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ncclops.classify.model import (
    BENIGN,
    CERTAINTY,
    ELIGIBLE_POLICIES,
    NO_FAILURE_SEEN,
    Classification,
    Evidence,
    Hit,
    Signature,
)
from ncclops.classify.observations import Observations
from ncclops.classify.xids import xid_of_line

if TYPE_CHECKING:
    from ncclops.classify.last_words import Guess

_FAILURE_SIGN = "context-failure-sign"
# Signs of a failure with an exception each: NCCL ends with a trace where a training that is done
# does not close its communicators, and a program that has come up says "error" of many a thing.
_NCCL_TRACE, _ERROR_LINE = "context-nccl-trace", "context-error-line"
# Ids of signatures of lines that carry facts: they read like what they are.
_FACTS = ("context-", "ncclops-")
_NCCL_VERSION = "context-nccl-version"
_XIDS = "xid-"
_NOTHING_SHOWN = "no known failure and no sign of a running job"
# A line that calls itself a warning may say anything: it shows no more than that.
ANY_WARNING = "benign-caught-warning"
_LAST_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (\d+)")
_MANY_LINES = 12


def verdict_on(
    leader: Hit, ordered: list[Hit], context: list[Hit], seen: Observations
) -> Classification:
    signature = leader.signature
    policy, reason = _retry(leader, ordered, context, seen)
    rank, blamed = _culprit(leader, ordered, seen)
    return Classification(
        class_=signature.class_,
        signature=signature.id,
        confidence=_confidence(leader, ordered),
        rank=rank,
        rank_began_it=blamed,
        phase=signature.phase,
        summary=signature.summary,
        retry_policy=policy,
        retry_reason=reason,
        remedy=_remedy(leader),
    )


def _remedy(leader: Hit) -> tuple[str, ...]:
    """The signature's; what NVIDIA asks for after the Xid that the line names comes first."""
    remedy = leader.signature.remedy
    if not leader.signature.id.startswith(_XIDS) or (xid := xid_of_line(leader.text)) is None:
        return remedy
    return (str(xid), *remedy)


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
        return "fix-config", f"ranks run different NCCL versions ({named}), which no retry can fix"
    progressed = seen.step_precedes(leader)
    if signature.retry_after_progress in ELIGIBLE_POLICIES:
        # Here progress argues for a retry, and so it must have been seen.
        progressed = seen.steps_were_seen(leader)
    if progressed:
        policy = signature.retry_after_progress
        return policy, f"the job was past its start: {_REASONS[policy]}"
    blocking = _needs_a_fix(leader, ordered)
    if blocking is not None and signature.retry in ELIGIBLE_POLICIES:
        return (
            "none",
            f"{blocking.signature.id} in {blocking.file}:{blocking.line} speaks against it",
        )
    return signature.retry, _REASONS[signature.retry]


def _needs_a_fix(leader: Hit, ordered: list[Hit]) -> Hit | None:
    """Another cause, as firm as the leader and no consequence of it, that no retry can fix."""

    def speaks_against(hit: Hit) -> bool:
        signature = hit.signature
        # The exception with which a process ends after the leading line adds nothing.
        same_process = hit.source == leader.source or (
            hit.rank is not None and hit.rank == leader.rank
        )
        gives_up = signature.certainty == "weak" or signature.teardown
        aftermath = gives_up and same_process and hit.order > leader.order
        return (
            signature.role == "cause"
            and signature.tier <= max(1, leader.signature.tier)
            and signature.retry in ("fix-config", "fix-code")
            and signature.class_ != leader.signature.class_
            and not aftermath
        )

    return next(filter(speaks_against, ordered), None)


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
        confidence *= 0.95 if signature.role == "symptom" else 0.8
    rivals = {
        hit.signature.class_
        for hit in ordered
        if hit.signature.tier == signature.tier and hit.signature.role == signature.role
    } - {signature.class_}
    return confidence * (0.9 if rivals else 1.0)


def _culprit(leader: Hit, ordered: list[Hit], seen: Observations) -> tuple[int | None, bool]:
    """(rank, whether it began the failure rather than reported it first)."""
    signature = leader.signature
    same = [hit for hit in ordered if hit.signature.id == signature.id]
    if signature.class_ == "watchdog-timeout" and (behind := _rank_behind(ordered)) is not None:
        return behind, True
    saw_a_peer_go = signature.class_ == "peer-exit" and not signature.exits
    if saw_a_peer_go and (ended := _first_to_end(ordered, seen)) is not None:
        return ended, True
    rank = next((hit.rank for hit in same if hit.rank is not None), None)
    if rank is None and seen.first_failed_rank is not None:
        return seen.first_failed_rank, True
    return rank, rank is not None and (signature.role == "cause" or leader.accuses)


def _first_to_end(ordered: list[Hit], seen: Observations) -> int | None:
    """The rank that ended first of those that have not seen a peer go."""
    saw_a_peer_go = {
        hit.rank
        for hit in ordered
        if hit.signature.class_ == "peer-exit" and not hit.signature.exits
    }
    exits = [hit.rank for hit in ordered if hit.signature.exits]
    ended = [rank for rank in (seen.first_failed_rank, *exits) if rank is not None]
    return next((rank for rank in ended if rank not in saw_a_peer_go), None)


def _rank_behind(ordered: list[Hit]) -> int | None:
    """The rank whose last enqueued work is lower than that of all others, as torch prints it."""
    enqueued: dict[int, int] = {}
    for hit in ordered:
        if hit.rank is not None and (found := _LAST_ENQUEUED.search(hit.text)):
            enqueued[hit.rank] = int(found[1])
    lowest = sorted(enqueued.items(), key=lambda item: item[1])[:2]
    if len(lowest) < 2 or lowest[0][1] == lowest[1][1]:
        return None
    return lowest[0][0]


def evidence_for(leader: Hit, ordered: list[Hit]) -> Iterable[Evidence]:
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
    """The leading line is shown as the cause, whatever role its signature has; others are not."""
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


def verdict_without_failure(seen: Observations) -> Classification:
    """Whether the job is healthy, no log says: its receipt does. Without a sign that the job ran
    after the last failure it is ``unknown`` whether it failed."""
    lives = seen.lives
    unanswered = {
        hit.signature.id
        for hit in seen.hits
        if not seen.step_follows(hit)
        and not (hit.signature.id == _NCCL_TRACE and seen.follows_the_end(hit))
    }
    unknown_failure = _unknown("something failed in a way that no signature knows")
    if unanswered & {_FAILURE_SIGN, _NCCL_TRACE}:
        return unknown_failure
    if any(life.ended_line for life in lives) or sum(life.steps for life in lives) > 1:
        return _nothing_failed(0.9, "the job took steps")
    if any(life.last_init_line for life in lives):
        return _nothing_failed(0.8, "communicators came up; no run of steps is shown")
    if any(life.steps for life in lives):
        return _nothing_failed(0.8, "one step is shown, and no more")
    if _ERROR_LINE in unanswered:
        return unknown_failure
    begun = any(life.begun for life in lives)
    if any(hit.signature.id != ANY_WARNING for hit in harmless_warnings(seen)):
        life = "the job began to start" if begun else "there is no sign of a running job"
        return _nothing_failed(0.6, f"{life}, and there are only harmless warnings", BENIGN)
    if begun:
        return _nothing_failed(0.6, "the job began to start, and there the log ends")
    return _unknown(_NOTHING_SHOWN)


def shows_nothing(verdict: Classification) -> bool:
    """Whether it is unknown because neither a failure nor a sign that the job ran was seen."""
    return verdict.class_ == "unknown" and verdict.summary == _NOTHING_SHOWN


def verdict_at_work() -> Classification:
    """Of logs in which programs tell what they do, and of nothing that it failed."""
    return _nothing_failed(0.6, "programs tell what they do, and no line says that it failed")


def harmless_warnings(seen: Observations) -> list[Hit]:
    """Lines that read like a failure and are none, the first of each kind."""
    found: dict[str, Hit] = {}
    for hit in sorted(seen.hits, key=lambda hit: hit.order):
        if hit.signature.role == "benign" and not hit.signature.id.startswith(_FACTS):
            found.setdefault(hit.signature.id, hit)
    return list(found.values())


def explained(warnings: Iterable[Hit]) -> tuple[tuple[Evidence, ...], tuple[str, ...]]:
    """The lines, and why each is harmless."""
    lines = tuple(
        Evidence(hit.file, hit.line, hit.text, hit.signature.id, "benign", hit.rank)
        for hit in warnings
    )
    return lines, tuple(map(_why_harmless, warnings))


def _why_harmless(hit: Hit) -> str:
    condition = f" ({hit.signature.condition})" if hit.signature.condition else ""
    return f"{hit.file}:{hit.line} is harmless: {hit.signature.summary}{condition}"


def verdict_by_words(found: Guess, rank: int | None) -> Classification:
    """Of a failure that no signature knows, whose words are those of a class."""
    words = ", ".join(found.words)
    return Classification(
        class_=found.class_,
        confidence=found.confidence,
        rank=rank,
        summary=f"no signature knows this failure; by its words ({words}) it is of this class",
        retry_reason=_REASONS["none"],
        remedy=_UNKNOWN_REMEDY,
    )


def nothing_read() -> Classification:
    """Of input without a byte, nothing can be said."""
    return _unknown("the input is empty")


def _nothing_failed(confidence: float, life: str, class_: str = NO_FAILURE_SEEN) -> Classification:
    summary = f"no failure seen: {life}; `ncclops receipt check` says whether it is healthy"
    return Classification(class_=class_, confidence=confidence, summary=summary)


def _unknown(summary: str) -> Classification:
    return Classification(
        class_="unknown",
        confidence=0.0,
        summary=summary,
        retry_reason="an unknown failure is not retried",
        remedy=_UNKNOWN_REMEDY,
    )


_UNKNOWN_REMEDY = (
    "classify the whole log of every rank: pass the directory, not one file",
    "run again with NCCL_DEBUG=WARN and TORCH_CPP_LOG_LEVEL=INFO",
)
