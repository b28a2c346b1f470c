"""Whether another attempt follows: the policy's word, the operator's, and what the lane says."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from ncclops.classify import Classification
from ncclops.classify.policy import PastAttempt, default_rules
from ncclops.decision.retrying import Escalated, RetryPlan, next_attempt

REFUSED = Classification(
    class_="bootstrap", confidence=0.9, summary="refused", retry_policy="retry-once-lazy"
)
MISTAKE = Classification(
    class_="user-error", confidence=0.5, summary="mistake", retry_policy="fix-code"
)
PLAN = RetryPlan(lane="generic", rules=default_rules(), granted=0)


def environ_after(plan: RetryPlan, verdict: Classification, *, failed_before: int = 0) -> object:
    """The environment of the attempt that follows; None when none does."""
    history = [PastAttempt.of(verdict, progressed=False)] * failed_before
    _, following = next_attempt(
        plan,
        verdict,
        history=history,
        granted_used=failed_before,
        progressed=False,
        random=lambda: 0.5,
    )
    return None if following is None else list(following.environ.values())


@pytest.mark.parametrize(
    ("plan", "verdict", "failed_before", "environ"),
    [
        (PLAN, REFUSED, 0, ["lazy", "skipped"]),
        (PLAN, REFUSED, 1, None),
        (PLAN, MISTAKE, 0, None),
        (replace(PLAN, granted=1), MISTAKE, 0, ["eager", "standard"]),
        (replace(PLAN, granted=1), MISTAKE, 1, None),
        (replace(PLAN, granted=1, lane="expert-parallel"), MISTAKE, 0, ["lazy", "skipped"]),
        (replace(PLAN, granted=2), REFUSED, 1, ["eager", "standard"]),
        (replace(PLAN, granted=5, allowed=False), REFUSED, 0, None),
    ],
)
def test_table(
    plan: RetryPlan, verdict: Classification, failed_before: int, environ: object
) -> None:
    assert environ_after(plan, verdict, failed_before=failed_before) == environ


@pytest.mark.parametrize("failed_start", [True, False])
def test_new_processes_after_a_failed_start_are_lazy_whatever_the_class(
    *, failed_start: bool
) -> None:
    escalated = Escalated(to="respawn", reason="waited", failure=None, failed_start=failed_start)
    decision, following = next_attempt(
        PLAN,
        replace(REFUSED, retry_policy="fix-config"),
        history=[],
        granted_used=0,
        progressed=False,
        random=lambda: 0.5,
        escalated=escalated,
    )
    assert following is not None
    assert (decision.action, decision.row) == (
        "retry",
        "startup-error" if failed_start else "generic",
    )
    assert list(following.environ.values()) == (
        ["lazy", "skipped"] if failed_start else ["eager", "standard"]
    )


def test_new_processes_after_a_failed_start_are_lazy_where_the_policy_retries_eagerly() -> None:
    verdict = replace(REFUSED, class_="network-transport", retry_policy="retry-after-cooldown")
    escalated = Escalated(to="respawn", reason="waited", failure=None, failed_start=True)
    for told, environ in ((escalated, ["lazy", "skipped"]), (None, ["eager", "standard"])):
        decision, following = next_attempt(
            PLAN,
            verdict,
            history=[],
            granted_used=0,
            progressed=False,
            random=lambda: 0.5,
            escalated=told,
        )
        assert following is not None
        assert following.cooldown == decision.cooldown > timedelta(0)
        assert list(following.environ.values()) == environ


def test_what_the_workers_know_to_be_final_is_not_retried_by_policy() -> None:
    escalated = Escalated(to="stop", reason="it comes back", failure=None)
    for plan, follows in ((PLAN, False), (replace(PLAN, granted=1), True)):
        decision, following = next_attempt(
            plan,
            REFUSED,
            history=[],
            granted_used=0,
            progressed=False,
            random=lambda: 0.5,
            escalated=escalated,
        )
        assert decision.reason == "it comes back"
        assert (following is not None) == follows


@pytest.mark.parametrize("passing", [True, False])
def test_ranks_that_could_not_be_freed_are_replaced_again_and_again(*, passing: bool) -> None:
    """Within the policy's limit for all attempts."""
    escalated = Escalated(to="respawn", reason="waited", failure=None, passing=passing)
    history = [PastAttempt.of(REFUSED, progressed=False)]

    def follows(history: list[PastAttempt]) -> bool:
        _, following = next_attempt(
            PLAN,
            replace(REFUSED, retry_policy="fix-config"),
            history=history,
            granted_used=0,
            progressed=False,
            random=lambda: 0.5,
            escalated=escalated,
        )
        return following is not None

    assert follows(history) == passing
    assert not follows(history * (PLAN.rules.max_attempts - 1))
