"""What was found and decided, in the fields of events."""

from __future__ import annotations

from datetime import timedelta

from ncclops.classify.model import Classification, Evidence
from ncclops.classify.policy import Decision
from ncclops.decision.as_events import classified_event, retry_event
from ncclops.decision.retrying import NextAttempt


def test_a_class_comes_with_the_lines_that_prove_it() -> None:
    verdict = Classification(
        class_="user-error", confidence=0.512, summary="a mistake", retry_policy="fix-code"
    )
    line = Evidence(file="stderr.log", line=7, text="KeyError", signature="x", role="cause", rank=3)
    event = classified_event(verdict, [line])
    assert (event.class_, event.confidence, event.summary) == ("user-error", 0.51, "a mistake")
    assert event.evidence is not None
    (kept,) = event.evidence
    assert (kept.file, kept.line, kept.text, kept.rank) == ("stderr.log", 7, "KeyError", 3)


def test_a_retry_says_why_it_follows_and_with_which_variables() -> None:
    """The policy may have said no; the reason is of what is done."""
    decision = Decision(action="stop", reason="it fails again", attempt=2)
    following = NextAttempt(
        reason="new processes", cooldown=timedelta(seconds=3), environ={"A": "1"}
    )
    event = retry_event(decision.as_json(), following)
    assert (event.action, event.attempt, event.reason) == ("stop", 2, "new processes")
    assert event.changes == {"A": "1"}
