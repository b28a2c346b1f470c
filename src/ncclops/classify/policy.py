"""What to do after a failure: a pure function from what is known to a decision.

The table is data (``retry.toml``, see ``retry_rules``). There is no clock and no store here:
the caller keeps the history (per job, so that it outlives an agent), waits the pause, and hands
in the source of randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ncclops.classify.model import Classification
from ncclops.classify.retry_rules import (
    LANE_ROW,
    LANES,
    STARTUP_ROW,
    Action,
    Lane,
    RetryRules,
    StartRow,
    default_rules,
)

__all__ = [
    "LANES",
    "Action",
    "Decision",
    "Lane",
    "PastAttempt",
    "RetryRules",
    "StartRow",
    "decide",
    "default_rules",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """One attempt that has ended, as the job's history keeps it."""

    class_: str
    signature: str | None
    policy: str
    progressed: bool
    """Whether it completed a step that no earlier attempt had completed."""

    @classmethod
    def of(cls, verdict: Classification, *, progressed: bool) -> PastAttempt:
        return cls(
            class_=verdict.class_,
            signature=verdict.signature,
            policy=verdict.retry_policy,
            progressed=progressed,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "class": self.class_,
            "signature": self.signature,
            "policy": self.policy,
            "progressed": self.progressed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PastAttempt:
        return cls(
            class_=str(data["class"]),
            signature=data["signature"],
            policy=str(data["policy"]),
            progressed=bool(data["progressed"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, how, and why; ``attempt`` is the number of the attempt that would follow."""

    action: Action
    reason: str
    attempt: int
    start: StartRow | None = None
    row: str | None = None
    cooldown: timedelta = field(default=timedelta(0))

    @property
    def retries(self) -> bool:
        return self.action != "stop"

    def as_json(self) -> dict[str, Any]:
        """The fields of a ``retry`` event."""
        start = self.start
        return {
            "action": self.action,
            "reason": self.reason,
            "attempt": self.attempt,
            "row": self.row,
            "init": start.init if start else None,
            "barrier": start.barrier if start else None,
            "watchdog": start.watchdog if start else None,
            "cooldown_s": round(self.cooldown.total_seconds(), 3),
        }


def decide(
    verdict: Classification,
    *,
    lane: Lane,
    history: Sequence[PastAttempt],
    progressed: bool,
    random: Callable[[], float],
    rules: RetryRules | None = None,
) -> Decision:
    """What to do after the attempt that ``verdict`` is about.

    ``history`` holds the attempts of the job that ended before this one, oldest first, on
    whichever agent; ``progressed`` says whether this one got further than they did; ``random``
    gives numbers from 0 to 1. What the table does not allow stops the job.
    """
    rules = rules or default_rules()
    following = len(history) + 2
    stop = _reason_to_stop(verdict, history, progressed, rules)
    if stop is not None:
        return Decision(action="stop", reason=stop, attempt=following)
    rule = rules.policies[verdict.retry_policy]
    row = lane if rule.row == LANE_ROW else rule.row
    used = _times_used(verdict.retry_policy, history)
    pause = rules.cooldown.pause(used, random) if rule.cooldown else timedelta(0)
    return Decision(
        action=rule.action,
        reason=f"{verdict.class_}: {verdict.retry_reason or verdict.summary}",
        attempt=following,
        start=rules.rows[row],
        row=row,
        cooldown=pause,
    )


def _reason_to_stop(
    verdict: Classification, history: Sequence[PastAttempt], progressed: bool, rules: RetryRules
) -> str | None:
    """Why this job must not go on; None when it may."""
    policy = verdict.retry_policy
    rule = rules.policies[policy]
    if not verdict.names_failure:
        return "no known failure explains the exit, and what is not known is not retried"
    if rule.action == "stop":
        return f"{verdict.class_} is not retried: {rule.why}"
    ended = len(history) + 1
    if ended >= rules.max_attempts:
        return f"{ended} attempts of the job have failed, which is the limit"
    idle = _attempts_without_progress(history, progressed)
    if idle >= rules.no_progress_attempts:
        return f"no progress over the last {idle} attempts"
    used = _times_used(policy, history)
    if used >= rule.times:
        return f"{policy} was tried {used} of {rule.times} times"
    if rule.row == STARTUP_ROW and progressed:
        return "the job had completed steps, and only a failure to start is retried this way"
    return None


def _times_used(policy: str, history: Sequence[PastAttempt]) -> int:
    # Each attempt in the history was followed by another one, so its policy was used.
    return sum(attempt.policy == policy for attempt in history)


def _attempts_without_progress(history: Sequence[PastAttempt], progressed: bool) -> int:
    idle = 0
    for made_progress in (progressed, *(attempt.progressed for attempt in reversed(history))):
        if made_progress:
            break
        idle += 1
    return idle
