"""What is left to do after a failed job: by the class's policy, what happened before, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclops.classify.model import RETRY_POLICIES, Classification
from ncclops.classify.policy import Decision
from ncclops.decision import next_action as module
from ncclops.decision.deciding import decide
from ncclops.decision.next_action import next_action
from ncclops.decision.node_end import CannotStart
from ncclops.decision.retrying import Escalated
from ncclops.errors import NodeUnfit
from ncclops.exit_codes import DEFAULT, SETS
from tests.decision.test_deciding import BROKEN, RULES, WELL, WORST, ending, failed, lost

STOP = Decision(action="stop", reason="", attempt=2)
RETRY = Decision(action="retry", reason="", attempt=2)
GIVEN_UP = Escalated(to="stop", reason="the failure comes back", failure=("E", "f:1"))
SCHEDULED = replace(RULES, exit_codes=SETS["scheduler"])


def found(
    policy: str, class_: str = "user-error", confidence: float = 0.9, signature: str | None = "x"
) -> Classification:
    return Classification(
        class_=class_, signature=signature, confidence=confidence, summary="", retry_policy=policy
    )  # fmt: skip


# the class's policy, the decision on it, what else is known, what is left to do
ROWS: dict[str, tuple[Classification, Decision, dict[str, Any], str]] = {
    "a passing failure, where no retry was allowed": (
        found("retry-after-cooldown"), RETRY, {}, "retry"),
    "a passing failure that has been retried as often as the policy says": (
        found("retry-once-lazy"), STOP, {}, "unknown"),
    "a node's failure": (found("replace-node"), RETRY, {}, "replace-node"),
    "a mistake before the first step": (found("fix-code"), STOP, {}, "fix"),
    "a program's own exception": (found("fix-code", confidence=0.75), STOP, {}, "fix"),
    "a wrong setting": (found("fix-config"), STOP, {}, "fix"),
    "a mistake after steps": (found("fix-code"), STOP, {"progressed": True}, "unknown"),
    "a mistake that is a guess": (found("fix-code", confidence=0.7), STOP, {}, "unknown"),
    "a failure that the workers know to come back": (
        found("none"), STOP, {"progressed": True, "escalated": GIVEN_UP}, "fix"),
    "one of which the workers say so, and its class that it passes": (
        found("retry-after-cooldown"), STOP, {"escalated": GIVEN_UP}, "unknown"),
    "a broken GPU, whatever the log says": (
        found("fix-code"), STOP, {"gpu_broken": True}, "replace-node"),
    "the scheduler has ended it": (found("none", "preempted"), STOP, {}, "retry"),
    "words alone say that the scheduler has ended it": (
        found("none", "preempted", 0.7, None), STOP, {}, "unknown"),
    "only victims are seen": (found("none", "peer-exit"), STOP, {}, "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_each_failure_leaves_one_thing_to_do(row: str) -> None:
    verdict, retry, known, expected = ROWS[row]
    given = {"progressed": False, "escalated": None, "gpu_broken": False} | known
    assert next_action(verdict, retry, **given) == expected


def test_each_policy_has_a_word() -> None:
    assert set(module._BY_POLICY) == set(RETRY_POLICIES)


def test_the_decision_has_it_with_the_exit_code_that_the_job_asks_for() -> None:
    ends = {
        "fix": ([failed(ending(0, 1), found=found("fix-code"))], 78),
        "replace-node": ([WELL, lost("n1")], 76),
        "unknown": ([replace(WORST, stopping=True)], 1),
        "retry": ([replace(WORST, cut_off="the job's store is lost")], 75),
    }
    for action, (nodes, code) in ends.items():
        decision = decide(nodes, SCHEDULED, random=lambda: 0.5)
        assert (decision.next_action, decision.exit_code) == (action, code), action
        assert decide(nodes, RULES, random=lambda: 0.5).exit_code == 1


def test_a_broken_gpu_asks_for_other_nodes() -> None:
    decision = decide([replace(WORST, gpu_faults=(BROKEN,))], SCHEDULED, random=lambda: 0.5)
    assert (decision.next_action, decision.exit_code) == ("replace-node", 76)


def test_a_node_that_is_not_fit_says_so() -> None:
    for codes, expected in ((DEFAULT, 3), (SETS["scheduler"], 76)):
        refused = CannotStart.of(NodeUnfit("the GPU is lost"), codes)
        end = replace(WELL, endings=(), failed=True, fatal=True, cannot_start=refused)
        decision = decide([end], replace(RULES, exit_codes=codes), random=lambda: 0.5)
        assert (decision.next_action, decision.exit_code) == ("replace-node", expected)


def test_what_has_not_failed_leaves_nothing_to_do() -> None:
    assert decide([WELL], SCHEDULED, random=lambda: 0.5).next_action is None
