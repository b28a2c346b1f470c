"""Whether another attempt follows a failed one: by the policy, and by the operator. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ncclops.classify.model import Classification
from ncclops.classify.policy import Decision, Lane, PastAttempt, RetryRules, StartRow, decide
from ncclops.classify.retry_rules import STARTUP_ROW
from ncclops.record.variables import BOOTSTRAP_BARRIER, NCCL_INIT, RESPAWNED_FOR


@dataclass(frozen=True, kw_only=True)
class RetryPlan:
    """What a job allows: the policy's table, and restarts that the operator granted."""

    lane: Lane
    rules: RetryRules
    granted: int  # --max-restarts: whatever failed
    allowed: bool = True  # False with --restart none


@dataclass(frozen=True, kw_only=True)
class Escalated:
    """What the workers request when restarts in place cannot help: ``to`` is ``respawn`` or
    ``stop``, ``failure`` what happened and where, which new processes compare with theirs.
    ``failed_start``: a communicator did not come up.
    """

    to: str
    reason: str
    failure: tuple[str, str] | None
    failed_start: bool = False

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Escalated:
        failure = record.get("failure")
        return cls(
            to=str(record.get("to")),
            reason=str(record.get("reason")),
            failure=(str(failure[0]), str(failure[1]))
            if isinstance(failure, list | tuple)
            else None,
            failed_start=bool(record.get("failed_start", False)),
        )


@dataclass(frozen=True, kw_only=True)
class NextAttempt:
    """Start again after ``cooldown``, with ``environ`` on top of the plan's variables."""

    reason: str
    cooldown: timedelta
    environ: dict[str, str]


def next_attempt(
    plan: RetryPlan,
    verdict: Classification,
    *,
    history: Sequence[PastAttempt],
    granted_used: int,
    progressed: bool,
    random: Callable[[], float],
    escalated: Escalated | None = None,
    replaces: bool = False,
) -> tuple[Decision, NextAttempt | None]:
    """The policy's decision, and the attempt that follows, if one does.

    ``history`` is the job's; ``granted_used`` counts the attempts that this agent has made
    after its first, since ``--max-restarts`` is an order to one agent.

    A restart that the operator granted (``--max-restarts``) is taken where the policy would
    stop: it is an order, and not evidence that the failure may be retried. It starts as the
    job's lane starts a retry. So does one for which the workers themselves have ``escalated``,
    within the policy's limits for any retry; after a failed start, it starts as a retry of that
    does. With ``replaces``, the node to be replaced is gone, and another one can take its place.
    """
    decision = decide(
        verdict,
        lane=plan.lane,
        history=history,
        progressed=progressed,
        random=random,
        rules=plan.rules,
    )
    if not plan.allowed:
        return decision, None
    variables = {} if escalated is None else respawned_for(escalated)
    if decision.action == "retry" or (decision.action == "replace-node" and replaces):
        return decision, _following(decision, variables)
    if escalated is not None and _may_respawn(plan.rules, escalated, history, progressed):
        row = STARTUP_ROW if escalated.failed_start else plan.lane
        environ = start_environ(plan.rules.rows[row]) | variables
        return decision, NextAttempt(
            reason=f"new processes: {escalated.reason}", cooldown=timedelta(0), environ=environ
        )
    if granted_used < plan.granted:
        left = plan.granted - granted_used
        reason = f"retrying by --max-restarts ({left} left); policy: {decision.reason}"
        environ = start_environ(plan.rules.rows[plan.lane]) | variables
        return decision, NextAttempt(reason=reason, cooldown=timedelta(0), environ=environ)
    return decision, None


def _may_respawn(
    rules: RetryRules, escalated: Escalated, history: Sequence[PastAttempt], progressed: bool
) -> bool:
    """New processes after an escalation: once, and again if the last ones got further."""
    if escalated.to != "respawn" or len(history) + 1 >= rules.max_attempts:
        return False
    return progressed or not history


def _following(decision: Decision, variables: Mapping[str, str]) -> NextAttempt:
    environ = {} if decision.start is None else start_environ(decision.start)
    return NextAttempt(
        reason=decision.reason, cooldown=decision.cooldown, environ={**environ, **variables}
    )


def respawned_for(escalated: Escalated) -> dict[str, str]:
    """The variable by which new processes learn for which failure they were started."""
    return {} if escalated.failure is None else {RESPAWNED_FOR: json.dumps(escalated.failure)}


def start_environ(start: StartRow) -> dict[str, str]:
    """The variables by which workers get a row of the retry table."""
    return {NCCL_INIT: start.init, BOOTSTRAP_BARRIER: start.barrier}
