"""The verdict that a run has in the end, whatever became of the agent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclops.agent.conclusion import conclude_crash, is_healthy
from ncclops.classify.model import Classification
from ncclops.classify.policy import Decision
from ncclops.record import event_log
from ncclops.record.event_values import RetryAdvice
from ncclops.record.events import VerdictEvent
from ncclops.record.run_directory import RunDirectory
from ncclops.record.verdict_record import (
    VERDICT,
    FailureClass,
    JudgedReceipt,
    RetryDecision,
    VerdictRecord,
    WorkerEnding,
)

ENDING = WorkerEnding(rank=1, pid=7, exit_code=None, signal=None, seconds=None)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(exact=tmp_path / "run", parent=None, node="n0")


def test_a_mistake_that_ends_the_agent_leaves_a_verdict(run: RunDirectory) -> None:
    run.paths.agent_log.touch()
    verdict = conclude_crash(run, TypeError("no"), attempts=2, endings=[ENDING], seconds=1.5)
    assert (verdict.outcome, verdict.exit_code) == ("failed", 1)
    document = json.loads(run.paths.verdict.read_text())
    assert document["reason"].startswith("internal error: TypeError: no; see ")
    assert "agent.log" in document["reason"]
    assert (document["attempts"], document["workers"][0]["rank"]) == (2, 1)
    (event,) = event_log.read(run.paths.events)
    assert isinstance(event, VerdictEvent)
    assert event.reason == document["reason"]


def test_a_verdict_that_stands_is_not_overwritten_by_a_later_mistake(run: RunDirectory) -> None:
    verdict = VerdictRecord(
        run_id="r", outcome="completed", exit_code=0, reason="well", attempts=1, seconds=2.0
    )
    run.write_verdict(verdict)
    conclude_crash(run, TypeError("no"), attempts=1, endings=[], seconds=1.0)
    assert VERDICT.read(run.paths.verdict) == verdict


@pytest.mark.parametrize(
    ("receipt", "healthy"),
    [
        (JudgedReceipt(verdict="healthy"), True),
        (JudgedReceipt(verdict="incomplete"), False),
        (None, None),
    ],
)
def test_a_receipt_that_could_not_be_judged_is_neither_healthy_nor_missing(
    receipt: JudgedReceipt | None, healthy: bool | None
) -> None:
    assert is_healthy(receipt) is healthy


def test_nothing_that_the_classifier_and_the_policy_say_is_missing_in_the_verdict() -> None:
    """They know nothing of the record: what they add has to be added to its types."""
    found = Classification(class_="unknown", confidence=0.0, summary="nothing")
    assert {*FailureClass.__struct_encode_fields__} == {*found.as_json(), "evidence", "decision"}
    assert {*RetryAdvice.__struct_fields__} == {*found.as_json()["retry"]}
    decision = Decision(action="stop", reason="unknown", attempt=2)
    assert {*RetryDecision.__struct_fields__} == {*decision.as_json()}
