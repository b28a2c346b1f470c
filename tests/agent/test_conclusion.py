"""The verdict that a run has in the end, whatever became of the agent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclops.agent.conclusion import conclude_crash, is_healthy
from ncclops.decision.outcome import Ending
from ncclops.record import event_log
from ncclops.record.events import VerdictEvent
from ncclops.record.run_directory import RunDirectory

ENDING = Ending(rank=1, pid=7, exit_code=None, signal=None, seconds=None)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(exact=tmp_path / "run", parent=None, node="n0")


def test_a_mistake_that_ends_the_agent_leaves_a_verdict(run: RunDirectory) -> None:
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
    run.write_verdict({"outcome": "completed"})
    conclude_crash(run, TypeError("no"), attempts=1, endings=[], seconds=1.0)
    assert json.loads(run.paths.verdict.read_text()) == {"outcome": "completed"}


@pytest.mark.parametrize(
    ("receipt", "healthy"),
    [({"verdict": "healthy"}, True), ({"verdict": "incomplete"}, False), (None, None)],
)
def test_a_receipt_that_could_not_be_judged_is_neither_healthy_nor_missing(
    receipt: dict[str, str] | None, healthy: bool | None
) -> None:
    assert is_healthy(receipt) is healthy
