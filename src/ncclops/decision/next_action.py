"""What is left to do after a failed job, for whoever may start it again. Pure.

The retry policy has said what ncclops itself does about it; this is what remains once that has come
to an end, in four words (:mod:`ncclops.exit_codes`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ncclops.classify.model import CERTAINTY, ELIGIBLE_POLICIES, Classification
from ncclops.classify.policy import Decision
from ncclops.decision.retrying import Escalated
from ncclops.exit_codes import NextAction

_BY_POLICY: Mapping[str, NextAction] = {
    "retry-once-lazy": "retry",
    "retry-after-cooldown": "retry",
    "replace-node": "replace-node",
    "fix-config": "fix",
    "fix-code": "fix",
    "none": "unknown",
}
# Where the class says more than its policy: ncclops does not start again what a scheduler has
# ended, and the scheduler does. A class by words alone, of no signature, says no more.
_BY_CLASS: Mapping[str, NextAction] = {"preempted": "retry"}
# Below it a class is more a guess than a finding, and "fix" may end a job for good. A program's own
# exception has just so much.
_SURE = CERTAINTY["weak"]


def next_action(
    verdict: Classification,
    retry: Decision,
    *,
    progressed: bool,
    escalated: Escalated | None,
    gpu_broken: bool,
) -> NextAction:
    """What may mend a failure that ``verdict`` is the class of, and ``retry`` the decision on.

    ``fix`` is said of a failure before the first new step, or where the workers know that it comes
    back, unless its class is one that passes. After that a start from a checkpoint gets further all
    the same, maybe past it. A policy of which the job has had its share is not recommended again.
    """
    if gpu_broken:
        return "replace-node"
    passes = verdict.retry_policy in ELIGIBLE_POLICIES
    if passes and retry.action == "stop":
        return "unknown"
    if escalated is not None and escalated.to == "stop" and not passes:
        return "fix"
    action = _BY_POLICY[verdict.retry_policy]
    if verdict.signature is not None:
        action = _BY_CLASS.get(verdict.class_, action)
    if action == "fix" and (progressed or verdict.confidence < _SURE):
        return "unknown"
    return action
