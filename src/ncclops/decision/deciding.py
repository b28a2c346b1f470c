"""The one decision: the result of an attempt, and whether another one follows. Pure.

From how the attempt ended on each node; a single node is a list of one. The first row that holds:

    a launcher was killed          failed, not tried again
    asked to stop                  interrupted (by a signal) or stopped
    a spare that was not needed    stopped
    nothing failed                 completed, or no-receipt
    anything else                  failed; tried again if the retry policy or the operator allows

A request to stop that came after the attempt had failed changes nothing but that nothing follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ncclops.classify import wording
from ncclops.classify.model import Classification
from ncclops.classify.policy import PastAttempt
from ncclops.decision.node_end import JobRules, NodeEnd
from ncclops.decision.outcome import SIGNAL_EXIT_BASE, describe_ending
from ncclops.decision.retrying import NextAttempt, next_attempt
from ncclops.errors import EXIT_INTERNAL_ERROR, ReceiptMissing
from ncclops.record.verdict_record import FirstFailure, Outcome, WorkerEnding

Random = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class AttemptDecision:
    """The result of an attempt. ``following`` is the attempt after it; None: the job has ended.

    ``failure`` and ``classification`` (JSON, with evidence) are what it was judged by, None where
    it did not fail. ``ranks_lost`` are those without which a job that restarts in place has
    finished; ranks of a node that did not report its end are not among them. ``attempt`` is what
    the job's history has to remember, ``retry`` the retry policy's decision with the fields of a
    ``retry`` event.
    """

    outcome: Outcome
    exit_code: int
    reason: str
    failure: FirstFailure | None = None
    ranks_lost: tuple[int, ...] = ()
    classification: dict[str, Any] | None = None
    attempt: PastAttempt | None = None
    retry: dict[str, Any] | None = None
    following: NextAttempt | None = None


def decide(nodes: Sequence[NodeEnd], rules: JobRules, *, random: Random) -> AttemptDecision:
    """The decision on the attempt that ended on ``nodes`` as described.

    ``random`` gives numbers from 0 to 1, for the pause before a retry.
    """
    present = [node for node in nodes if not node.idle]
    if orphan := next((node for node in nodes if node.launcher_lost), None):
        return AttemptDecision(
            outcome="failed",
            exit_code=1,
            reason=f"the launcher was killed{_on(orphan, nodes)}; the agent stopped the workers",
            failure=orphan.failure,
            classification=orphan.classification,
        )
    if stopped := next((node for node in nodes if node.stop is not None), None):
        return _stopped(stopped, nodes)
    refused = next((node.cannot_start for node in present if node.cannot_start), None)
    if refused is not None and not refused.needed:
        return AttemptDecision(
            outcome="stopped", exit_code=refused.exit_code, reason=refused.reason
        )
    if _is_completed(present, rules):
        return _completed(present, nodes, rules)
    return _failed(present, nodes, rules, random)


def _stopped(asked: NodeEnd, nodes: Sequence[NodeEnd]) -> AttemptDecision:
    assert asked.stop is not None
    forced = [ending for node in nodes for ending in node.bad]
    how = f"; {_ranks(forced)} did not exit cleanly" if forced else ""
    request, on = asked.stop, _on(asked, nodes)
    if request.signum is not None:
        return AttemptDecision(
            outcome="interrupted",
            exit_code=SIGNAL_EXIT_BASE + request.signum,
            reason=f"stopped by {request.signum.name}{on}{how}",
        )
    return AttemptDecision(
        outcome="stopped",
        exit_code=1 if forced else 0,
        reason=f"stopped{on}: {request.reason}{how}",
    )


def _is_completed(present: Sequence[NodeEnd], rules: JobRules) -> bool:
    if any(node.fatal or node.failed_first or node.cannot_start for node in present):
        return False
    if not any(node.lost is not None or node.failed or node.bad for node in present):
        return True
    return rules.losses_allowed and any(node.well for node in present)


def _completed(
    present: Sequence[NodeEnd], nodes: Sequence[NodeEnd], rules: JobRules
) -> AttemptDecision:
    well = sum(node.well for node in present)
    lost = tuple(sorted(ending.rank for node in present for ending in node.bad))
    reason = f"{well} worker{'s' * (well != 1)} exited 0"
    if len(nodes) > 1:
        finished = sum(node.lost is None for node in present)
        reason += f" on {finished} node{'s' * (finished != 1)}"
    for node in present:
        if node.lost is not None:
            reason += f"; {wording.describe_loss(node.name, node.lost)}, the others went on"
        for ending in node.bad:
            reason += f"; rank {ending.rank} {describe_ending(ending)}, the others went on"
    if rules.require_receipt and not any(node.healthy for node in present):
        # Not judged is neither healthy nor missing, and has an exit code of its own.
        unjudged = any(node.healthy is None for node in present)
        if unjudged:
            reason += "; the receipt could not be judged, by an error of ncclops (see agent.log)"
        else:
            reason += "; --require-receipt asked for a healthy receipt, and there is none"
        code = EXIT_INTERNAL_ERROR if unjudged else ReceiptMissing.exit_code
        return AttemptDecision(outcome="no-receipt", exit_code=code, reason=reason, ranks_lost=lost)
    return AttemptDecision(outcome="completed", exit_code=0, reason=reason, ranks_lost=lost)


def _failed(
    present: Sequence[NodeEnd], nodes: Sequence[NodeEnd], rules: JobRules, random: Random
) -> AttemptDecision:
    blamed = _blamed(present)
    reason, code, classification = _what_failed(blamed, nodes), 1, blamed.classification
    if blamed.lost is not None:
        classification = wording.loss(reason).as_json() | {"evidence": []}
    if blamed.cannot_start is not None:
        code, classification = blamed.cannot_start.exit_code, None
    if blamed.cut_off is not None:
        reason += f"; {blamed.cut_off}"
    decided = AttemptDecision(
        outcome="failed",
        exit_code=code,
        reason=reason,
        failure=None if blamed.cannot_start else blamed.failure,
        classification=classification,
    )
    nothing_follows = blamed.cut_off is not None or blamed.cannot_start is not None
    if nothing_follows or any(node.stopping for node in nodes):
        return decided
    return _retried(decided, blamed, present, rules, random)


def _retried(
    decided: AttemptDecision,
    blamed: NodeEnd,
    present: Sequence[NodeEnd],
    rules: JobRules,
    random: Random,
) -> AttemptDecision:
    """``decided`` with the retry policy's decision, and the attempt that follows, if one does."""
    found = decided.classification
    verdict = _UNKNOWN if found is None else Classification.from_json(found)
    progressed = any(node.progressed for node in present)
    retry, following = next_attempt(
        rules.retry,
        verdict,
        history=rules.history,
        granted_used=rules.granted_used,
        progressed=progressed,
        random=random,
        escalated=blamed.escalated,
        replaces=rules.replaceable and blamed.lost is not None,
    )
    reason = decided.reason
    if following is not None and not rules.replaceable and any(n.lost is not None for n in present):
        following = None
        reason += "; no retry: with --rdzv-backend static no other node can take its place"
    return replace(
        decided,
        reason=reason,
        attempt=PastAttempt.of(verdict, progressed=progressed),
        retry=retry.as_json(),
        following=following,
    )


_UNKNOWN = Classification(class_="unknown", confidence=0.0, summary="nothing was classified")


def _blamed(present: Sequence[NodeEnd]) -> NodeEnd:
    """The node to judge a failed attempt by."""
    ended = [node for node in present if node.lost is None]
    lost = next((node for node in present if node.lost is not None), None)
    first = next((node for node in present if node.failed_first), None)
    if first is not None and first.lost is None:
        return first
    if first is None and lost is not None:
        return lost
    # A node that ended with a cause of its own before one that only lost its peers.
    failed = [node for node in ended if node.failed] or [node for node in ended if node.bad]
    return max(failed, key=_confidence, default=lost or present[0])


def _confidence(node: NodeEnd) -> float:
    return float((node.classification or {}).get("confidence", 0.0))


def _what_failed(blamed: NodeEnd, nodes: Sequence[NodeEnd]) -> str:
    if blamed.lost is not None:
        return wording.describe_loss(blamed.name, blamed.lost)
    if blamed.cannot_start is not None:
        return f"{blamed.cannot_start.reason}{_on(blamed, nodes)}"
    if blamed.hang is not None:
        return f"hang: {blamed.hang}{_on(blamed, nodes)}"
    unasked = [each for each in blamed.bad if not each.asked_to_stop]
    ending = blamed.failure or next(iter([*unasked, *blamed.bad]), None)
    what = "a worker failed" if ending is None else f"rank {ending.rank} {describe_ending(ending)}"
    return f"{what}{_on(blamed, nodes)}"


def _on(node: NodeEnd, nodes: Sequence[NodeEnd]) -> str:
    """Which node, where there are several."""
    return f" on {node.name}" if len(nodes) > 1 else ""


def _ranks(endings: Sequence[WorkerEnding]) -> str:
    numbers = ", ".join(str(ending.rank) for ending in endings)
    return f"rank{'s' * (len(endings) != 1)} {numbers}"
