"""The retry matrix, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from ncclops.classify.model import ELIGIBLE_POLICIES, RETRY_POLICIES, Classification
from ncclops.classify.policy import Decision, Lane, PastAttempt, RetryRules, decide, default_rules
from ncclops.errors import UsageError


def verdict(policy: str, class_: str = "bootstrap") -> Classification:
    return Classification(
        class_=class_, signature="sig", confidence=0.9, summary="it failed", retry_policy=policy
    )


def attempt(policy: str = "retry-once-lazy", *, progressed: bool = False) -> PastAttempt:
    return PastAttempt.of(verdict(policy), progressed=progressed)


def ask(
    policy: str,
    lane: Lane = "generic",
    history: Sequence[PastAttempt] = (),
    *,
    progressed: bool = False,
    rules: RetryRules | None = None,
    class_: str = "bootstrap",
) -> Decision:
    return decide(
        verdict(policy, class_),
        lane=lane,
        history=history,
        progressed=progressed,
        random=lambda: 0.0,
        rules=rules,
    )


# (policy, lane, progressed) -> (action, row, init, barrier, cooldown in seconds)
STOP = ("stop", None, None, None, 0)
GENERIC, EXPERT = ("generic", "eager", "standard"), ("expert-parallel", "lazy", "skipped")
STARTUP = ("startup-error", "lazy", "skipped")
MATRIX: list[tuple[str, Lane, bool, tuple[Any, ...]]] = [
    ("retry-once-lazy", "generic", False, ("retry", *STARTUP, 0)),
    ("retry-once-lazy", "expert-parallel", False, ("retry", *STARTUP, 0)),
    ("retry-once-lazy", "generic", True, STOP),
    ("retry-after-cooldown", "generic", False, ("retry", *GENERIC, 30)),
    ("retry-after-cooldown", "expert-parallel", True, ("retry", *EXPERT, 30)),
    ("replace-node", "generic", True, ("replace-node", *GENERIC, 0)),
    ("replace-node", "expert-parallel", False, ("replace-node", *EXPERT, 0)),
    ("fix-config", "generic", True, STOP),
    ("fix-config", "expert-parallel", False, STOP),
    ("fix-code", "generic", True, STOP),
    ("fix-code", "expert-parallel", False, STOP),
    ("none", "generic", False, STOP),
    ("none", "expert-parallel", True, STOP),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "lane", "progressed", "expected"), MATRIX)
def test_first_failure(
    policy: str, lane: Lane, progressed: bool, expected: tuple[Any, ...]
) -> None:
    decision = ask(policy, lane, progressed=progressed)
    start = decision.start
    shown = (
        decision.action,
        decision.row,
        start.init if start else None,
        start.barrier if start else None,
        decision.cooldown.total_seconds(),
    )
    assert shown == expected
    assert decision.reason
    assert start is None or start.watchdog == "standard"
    assert decision.attempt == 2


def test_the_matrix_covers_every_policy_in_both_lanes() -> None:
    assert {(policy, lane) for policy, lane, _, _ in MATRIX} == {
        (policy, lane) for policy in RETRY_POLICIES for lane in ("generic", "expert-parallel")
    }


def test_only_eligible_policies_are_ever_retried() -> None:
    for name, rule in default_rules().policies.items():
        assert (rule.action != "stop") == (name in ELIGIBLE_POLICIES)


def test_a_start_up_error_is_retried_once() -> None:
    again = ask("retry-once-lazy", history=[attempt()])
    assert again.action == "stop" and "1 of 1" in again.reason


@pytest.mark.parametrize("class_", ["unknown", "no-failure-seen", "benign"])
def test_what_is_not_known_is_not_retried(class_: str) -> None:
    assert ask("retry-after-cooldown", class_=class_).action == "stop"


def test_a_stop_says_why() -> None:
    decision = ask("fix-code", class_="coalesced-unsupported")
    assert decision.reason.startswith("coalesced-unsupported is not retried: the same program")


def test_no_progress_stops_the_job() -> None:
    history = [attempt("replace-node"), attempt("retry-after-cooldown")]
    stopped = ask("replace-node", history=history)
    assert stopped.action == "stop" and "no progress over the last 3 attempts" in stopped.reason
    assert ask("replace-node", history=history, progressed=True).action == "replace-node"
    moved = [attempt("replace-node", progressed=True), attempt("retry-after-cooldown")]
    assert ask("replace-node", history=moved).action == "replace-node"


def test_attempts_are_counted_for_the_job() -> None:
    history = [
        attempt(policy, progressed=True)
        for policy in (
            "replace-node",
            "retry-after-cooldown",
            "retry-after-cooldown",
            "replace-node",
        )
    ]
    decision = ask("retry-after-cooldown", history=history, progressed=True)
    assert decision.action == "stop" and "5 attempts" in decision.reason


def test_each_policy_has_its_own_count() -> None:
    history = [attempt("replace-node", progressed=True)] * 2
    assert ask("replace-node", history=history, progressed=True).action == "stop"
    assert ask("retry-after-cooldown", history=history, progressed=True).action == "retry"


@pytest.mark.parametrize(
    ("earlier", "draw", "seconds"),
    [(0, 0, 30), (1, 0, 60), (2, 0, 120), (0, 1, 15), (0, 0.5, 22.5), (9, 0, 600), (5000, 0, 600)],
)
def test_pauses_grow_and_are_shortened_at_random(earlier: int, draw: float, seconds: float) -> None:
    pause = default_rules().cooldown.pause(earlier, lambda: draw)
    assert pause == timedelta(seconds=seconds)


def test_history_survives_a_restart_of_the_agent() -> None:
    original = attempt("replace-node", progressed=True)
    assert PastAttempt.from_json(original.as_json()) == original


def test_a_decision_is_an_event() -> None:
    assert ask("retry-after-cooldown", "expert-parallel").as_json() == {
        "action": "retry",
        "reason": "bootstrap: it failed",
        "attempt": 2,
        "row": "expert-parallel",
        "init": "lazy",
        "barrier": "skipped",
        "watchdog": "standard",
        "cooldown_s": 30.0,
    }


def test_a_profile_changes_counts_and_single_rows() -> None:
    rules = default_rules().overridden(
        {
            "limits": {"no_progress_attempts": 9, "max_attempts": 9},
            "rows": {"generic": {"init": "lazy"}},
            "policies": {"retry-once-lazy": {"times": 2}},
            "cooldown": {"first": "2s"},
        }
    )
    assert ask("retry-once-lazy", history=[attempt()], rules=rules).action == "retry"
    cooled = ask("retry-after-cooldown", rules=rules)
    assert cooled.start and (cooled.start.init, cooled.start.barrier) == ("lazy", "standard")
    assert cooled.cooldown == timedelta(seconds=2)
    assert default_rules().rows["generic"].init == "eager"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"limit": {}}, "retry.limit: unknown"),
        ({"limits": {"max": 3}}, "retry.limits.max: unknown"),
        ({"limits": {"max_attempts": 0}}, "retry.limits.max_attempts = 0"),
        ({"limits": {"max_attempts": "3"}}, "retry.limits.max_attempts = '3'"),
        ({"limits": 3}, "retry.limits must be a table"),
        ({"rows": {"fast": {}}}, "retry.rows.fast: unknown"),
        ({"rows": {"generic": {"init": "late"}}}, "retry.rows.generic: init is eager or lazy"),
        ({"rows": {"generic": {"watchdog": "off"}}}, "standard watchdog"),
        ({"policies": {"fix-code": {"action": "retry"}}}, "cannot be retried"),
        ({"policies": {"replace-node": {"row": "fast"}}}, "there is no row 'fast'"),
        ({"policies": {"replace-node": {"times": -1}}}, "times = -1"),
        ({"policies": {"replace-node": {"action": "pray"}}}, "retry, replace-node or stop"),
        ({"cooldown": {"first": "soon"}}, "retry.cooldown.first = 'soon'"),
        ({"cooldown": {"first": 30}}, "retry.cooldown.first = 30"),
        ({"cooldown": {"jitter": 2}}, "retry.cooldown.jitter = 2"),
    ],
)
def test_a_profile_that_asks_for_nonsense_is_refused(
    changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        default_rules().overridden(changes)
    assert complaint in str(caught.value)
