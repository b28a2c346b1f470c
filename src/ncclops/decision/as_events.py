"""The classification of a failed attempt and the decision on it, as events of the run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ncclops.classify.model import Classification, Evidence
from ncclops.decision.retrying import NextAttempt
from ncclops.record.event_values import EvidenceLine, RetryAdvice
from ncclops.record.events import ClassifiedEvent, RetryEvent


def classified_event(verdict: Classification, evidence: Sequence[Evidence]) -> ClassifiedEvent:
    """What the classifier says of the attempt, with the lines that prove it."""
    return ClassifiedEvent(
        rank=verdict.rank,
        class_=verdict.class_,
        signature=verdict.signature,
        confidence=round(verdict.confidence, 2),
        rank_began_it=verdict.rank_began_it,
        phase=verdict.phase,
        summary=verdict.summary,
        retry=RetryAdvice(
            eligible=verdict.eligible, policy=verdict.retry_policy, reason=verdict.retry_reason
        ),
        remedy=list(verdict.remedy),
        evidence=[
            EvidenceLine(
                file=line.file,
                line=line.line,
                text=line.text,
                signature=line.signature,
                role=line.role,
                rank=line.rank,
            )
            for line in evidence
        ],
    )


def retry_event(decided: Mapping[str, Any], following: NextAttempt) -> RetryEvent:
    """The attempt that follows. ``decided`` is a ``Decision`` as JSON, maybe of another node."""
    return RetryEvent(
        action=decided["action"],
        attempt=decided["attempt"],
        reason=following.reason,
        row=decided["row"],
        init=decided["init"],
        barrier=decided["barrier"],
        watchdog=decided["watchdog"],
        cooldown_s=decided["cooldown_s"],
        changes=dict(following.environ),
    )
