"""Whether another attempt follows a failed one: by the policy, and by the operator. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

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
    ``failed_start``: a communicator did not come up. ``passing``: nothing is known to be wrong with
    the processes but that they could not be freed. ``hung``: the rank that hangs, if that was it.
    """

    to: str
    reason: str
    failure: tuple[str, str] | None
    failed_start: bool = False
    passing: bool = False
    hung: int | None = None

    @property
    def knows_failure(self) -> bool:
        """A rank that is ended since it waited for a communicator does not: what those say that
        are left replaces it."""
        return not self.failed_start or self.failure is not None


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
    """What is done, and the attempt that follows, if one does.

    ``history`` is the job's; ``granted_used`` counts the attempts that this agent has made
    after its first, since ``--max-restarts`` is an order to one agent.

    A restart that the operator granted (``--max-restarts``) is taken where the policy would
    stop: it is an order, and not evidence that the failure may be retried. It starts as the
    job's lane starts a retry. So does one for which the workers themselves have ``escalated``,
    within the policy's limits for any retry. What the workers know to be final the policy does
    not retry. After a failed start, each starts as a retry of that does. With ``replaces``, the
    node to be replaced is gone, and another one can take its place.
    """
    decision = decide(
        verdict,
        lane=plan.lane,
        history=history,
        progressed=progressed,
        random=random,
        rules=plan.rules,
    )
    if decision.action == "retry" and escalated is not None and escalated.to == "stop":
        decision = Decision(action="stop", reason=escalated.reason, attempt=decision.attempt)
    if not plan.allowed:
        return decision, None
    variables = {} if escalated is None else respawned_for(escalated)
    failed_start = escalated is not None and escalated.failed_start
    row = STARTUP_ROW if failed_start else plan.lane
    if decision.action == "retry" or (decision.action == "replace-node" and replaces):
        if failed_start:
            decision = replace(decision, row=row, start=plan.rules.rows[row])
        return decision, _following(decision, decision.reason, variables)
    if escalated is not None and _may_respawn(plan.rules, escalated, history, progressed):
        done = _at_once(decision, row, plan.rules)
        return done, _following(done, f"new processes: {escalated.reason}", variables)
    if granted_used < plan.granted:
        left = plan.granted - granted_used
        reason = f"retrying by --max-restarts ({left} left); policy: {decision.reason}"
        done = _at_once(decision, row, plan.rules)
        return done, _following(done, reason, variables)
    return decision, None


def _at_once(decision: Decision, row: str, rules: RetryRules) -> Decision:
    """A retry in ``row`` where the policy has decided otherwise; the reason stays the policy's."""
    return replace(decision, action="retry", row=row, start=rules.rows[row], cooldown=timedelta(0))


def _may_respawn(
    rules: RetryRules, escalated: Escalated, history: Sequence[PastAttempt], progressed: bool
) -> bool:
    """New processes after an escalation: once; again if the last ones got further, or were well."""
    if escalated.to != "respawn" or len(history) + 1 >= rules.max_attempts:
        return False
    return progressed or escalated.passing or not history


def _following(decision: Decision, reason: str, variables: Mapping[str, str]) -> NextAttempt:
    environ = {} if decision.start is None else start_environ(decision.start)
    return NextAttempt(reason=reason, cooldown=decision.cooldown, environ={**environ, **variables})


def respawned_for(escalated: Escalated) -> dict[str, str]:
    """The variable by which new processes learn for which failure they were started."""
    return {} if escalated.failure is None else {RESPAWNED_FOR: json.dumps(escalated.failure)}


def start_environ(start: StartRow) -> dict[str, str]:
    """The variables by which workers get a row of the retry table."""
    return {NCCL_INIT: start.init, BOOTSTRAP_BARRIER: start.barrier}
