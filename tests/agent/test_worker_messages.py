"""What workers report: what it means for the team, and what the run's record takes over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ncclops.agent.team import Team
from ncclops.agent.worker_messages import take_over
from ncclops.decision.retrying import Escalated
from ncclops.record import events
from ncclops.record.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(exact=tmp_path / "run", parent=None, node="n1")


@pytest.fixture
def team() -> Team:
    return Team(restarts_in_process=True)


def recorded(run: RunDirectory) -> list[dict[str, Any]]:
    """The events of the run, without when and where."""
    kept = [json.loads(line) for line in run.paths.events.read_text().splitlines()]
    return [{k: v for k, v in each.items() if k not in ("ts", "node")} for each in kept]


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (events.EnteredEvent(), "entered"),
        (events.ReadyToEndEvent(), "ready_to_end"),
        (events.BootstrappedEvent(), "bootstrapped"),
        (events.GroupsAbortedEvent(), "aborted"),
    ],
)
def test_what_a_worker_reports_of_itself_is_known_of_its_rank(
    run: RunDirectory, team: Team, event: events.Event, field: str
) -> None:
    take_over(run, team, 3, event)
    fields = ("entered", "ready_to_end", "bootstrapped", "aborted")
    assert {name: getattr(team, name) for name in fields if getattr(team, name)} == {field: {3}}


def test_a_fault_is_the_rank_s_that_it_names(run: RunDirectory, team: Team) -> None:
    """Any rank may be the one that writes it down."""
    take_over(run, team, 0, events.FaultEvent(rank=2, cause="the process died", kind="died"))
    assert team.last_faulty == 2
    (kept,) = recorded(run)
    assert (kept["event"], kept["rank"], kept["cause"]) == ("fault", 2, "the process died")


def test_all_ranks_escalate_and_the_first_is_recorded(run: RunDirectory, team: Team) -> None:
    for rank in (1, 0):
        event = events.EscalationEvent(to="respawn", reason=f"says rank {rank}", failure=("E", "f"))
        take_over(run, team, rank, event)
    assert team.escalation == Escalated(to="respawn", reason="says rank 1", failure=("E", "f"))
    assert [(each["event"], each["rank"]) for each in recorded(run)] == [("escalation", 1)]


def test_what_only_the_team_needs_and_what_a_script_may_write_is_not_recorded(
    run: RunDirectory, team: Team
) -> None:
    take_over(run, team, 0, events.EnteredEvent())
    take_over(run, team, 0, events.StepEvent(step=7))
    assert recorded(run) == []
