"""What workers report: what it means for the team, and what the run's record takes over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ncclops.agent.team import Team
from ncclops.agent.worker_messages import forced_exit_line, take_over
from ncclops.decision.retrying import Escalated
from ncclops.record import events
from ncclops.record.run_directory import RunDirectory
from ncclops.restart.attribution import FaultKind


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
        (events.FinishedEvent(), "finished"),
        (events.ExitingEvent(), "finished"),
    ],
)
def test_what_a_worker_reports_of_itself_is_known_of_its_rank(
    run: RunDirectory, team: Team, event: events.Event, field: str
) -> None:
    take_over(run, team, 3, event)
    fields = ("entered", "ready_to_end", "bootstrapped", "aborted", "finished")
    assert {name: getattr(team, name) for name in fields if getattr(team, name)} == {field: {3}}
    assert team.leaving == ({3} if field == "finished" else set())


@pytest.mark.parametrize(
    ("failures", "starting_up"),
    [
        pytest.param({}, True, id="no rank had a process group"),
        pytest.param({0: (0, None)}, True, id="the same, and the recorder is off"),
        pytest.param({0: (0, False), 1: (0, True)}, True, id="one rank's group had done nothing"),
        pytest.param({0: (0, False), 1: (0, None)}, False, id="all that know had completed one"),
        pytest.param({0: (1, False), 1: (0, True)}, False, id="the last start counts"),
    ],
)
def test_start_up_lasts_until_each_group_of_a_failed_rank_has_completed_a_collective(
    run: RunDirectory,
    team: Team,
    failures: dict[int, tuple[int, bool | None]],
    *,
    starting_up: bool,
) -> None:
    for rank, (iteration, starting) in failures.items():
        event = events.ScriptFailedEvent(iteration=iteration, starting_up=starting)
        take_over(run, team, rank, event)
    assert team.starting_up() is starting_up
    assert recorded(run) == []


def test_without_a_word_of_a_failed_rank_a_process_group_leaves_it_open(
    run: RunDirectory, team: Team
) -> None:
    take_over(run, team, 0, events.BootstrappedEvent())
    assert team.starting_up() is None


def test_a_fault_is_the_rank_s_that_it_names(run: RunDirectory, team: Team) -> None:
    """Any rank may be the one that writes it down."""
    take_over(run, team, 0, events.FaultEvent(rank=2, cause="the process died", kind="died"))
    assert team.last_faulty == 2
    (kept,) = recorded(run)
    assert (kept["event"], kept["rank"], kept["cause"]) == ("fault", 2, "the process died")


def test_a_rank_that_died_and_is_there_again_is_at_fault_no_more(
    run: RunDirectory, team: Team
) -> None:
    """A stop that comes then finds other processes, which only end."""
    take_over(run, team, 0, events.FaultEvent(rank=2, cause="the process died", kind="died"))
    restart = events.RestartEvent(
        iteration=1, cause="rank 2: the process died", faulty_ranks=[2], ranks_lost=[2],
        ranks_returned=[2], world_size=3, phases_ms={},
    )  # fmt: skip
    take_over(run, team, 0, restart)
    assert team.last_faulty is None


def test_all_ranks_escalate_and_the_first_is_recorded(run: RunDirectory, team: Team) -> None:
    for rank in (1, 0):
        event = events.EscalationEvent(to="respawn", reason=f"says rank {rank}", failure=("E", "f"))
        take_over(run, team, rank, event)
    assert team.escalation == Escalated(to="respawn", reason="says rank 1", failure=("E", "f"))
    assert [(each["event"], each["rank"]) for each in recorded(run)] == [("escalation", 1)]


def test_what_a_rank_reports_that_knows_the_failure_replaces_what_one_does_not(
    run: RunDirectory, team: Team
) -> None:
    """A rank that waited in NCCL reports that before it is ended; it may be the only one to."""
    waited = events.EscalationEvent(to="respawn", reason="rank 0 waited", failed_start=True)
    known = events.EscalationEvent(to="respawn", reason="ranks 0, 1 waited", passing=True)
    for rank, event in enumerate((waited, waited, known, known, waited)):
        take_over(run, team, rank, event)
    assert team.escalation == Escalated(
        to="respawn", reason="ranks 0, 1 waited", failure=None, passing=True
    )
    assert [(each["event"], each["rank"]) for each in recorded(run)] == [
        ("escalation", 0),
        ("escalation", 2),
    ]


def test_why_ranks_were_ended_is_known_of_all_restarts(run: RunDirectory, team: Team) -> None:
    """The rank that reports it is none of them."""
    for why in ({"3": "it hung"}, {"x": "y"}, {"1": "its abort hung"}):
        take_over(run, team, 0, events.RestartEvent(why_ended=why))
    assert team.why_ended == {1: "its abort hung", 3: "it hung"}


def test_a_rank_that_comes_back_too_late_ends_for_what_the_others_had_missed(
    run: RunDirectory, team: Team
) -> None:
    """As on a node that was stopped for a while: that it exits with 1 says nothing."""
    assert events.RANK_LOST == FaultKind.LOST
    silent = events.FaultEvent(cause="rank 1: no heartbeat for 6 s", kind="lost")
    take_over(run, team, 0, replace(silent, rank=1))  # another one tells of it
    assert team.explained == {}
    take_over(run, team, 1, silent)
    assert team.explained == {1: "no heartbeat for 6 s"}


def test_a_process_that_the_others_have_left_behind_is_said_to_be_what_it_is(
    run: RunDirectory, team: Team
) -> None:
    exec_ed = "its process has become another program (exec)"
    take_over(run, team, 0, events.FaultEvent(rank=1, cause=f"rank 1: {exec_ed}", kind="lost"))
    take_over(run, team, 0, events.RestartEvent(ranks_lost=[1]))
    assert exec_ed in forced_exit_line(team, 1, 30)
    assert "its script has ended" in forced_exit_line(team, 2, 30)
    assert team.explained == {1: exec_ed}


def test_what_only_the_team_needs_and_what_a_script_may_write_is_not_recorded(
    run: RunDirectory, team: Team
) -> None:
    take_over(run, team, 0, events.EnteredEvent())
    take_over(run, team, 0, events.StepEvent(step=7))
    assert recorded(run) == []


def test_once_the_attempt_is_ending_ranks_that_leave_request_nothing(
    run: RunDirectory, team: Team
) -> None:
    team.announce_end("the run is stopping")
    take_over(run, team, 1, events.EscalationEvent(to="stop", reason="the run is stopping"))
    assert team.escalation is None
    assert recorded(run) == []


PLAIN = events.OwnWrapperEvent(wrapper="ncclops.restart")
GROWING = events.OwnWrapperEvent(wrapper="ncclops.restart", grows=True)
OTHER = events.OwnWrapperEvent(wrapper="nvidia_resiliency_ext.inprocess")


@pytest.mark.parametrize(
    ("reported", "asked", "grows", "why_not"),
    [
        pytest.param([], False, False, None, id="neither wants it"),
        pytest.param([], True, True, None, id="launch is asked to"),
        pytest.param([GROWING, GROWING], False, True, None, id="the script is enough"),
        pytest.param([PLAIN, GROWING, PLAIN], False, True, None, id="one of its wrappers"),
        pytest.param([PLAIN], False, False, "of ncclops.restart, has no", id="as it says itself"),
        pytest.param([PLAIN], True, True, "of ncclops.restart, has no", id="launch cannot help"),
        pytest.param([OTHER], True, True, "of nvidia_resiliency_ext", id="nor with the other one"),
    ],
)
def test_a_script_that_wraps_itself_says_whether_lost_ranks_come_back(
    run: RunDirectory,
    team: Team,
    reported: list[events.Event],
    asked: bool,
    grows: bool,
    why_not: str | None,
) -> None:
    for rank, event in enumerate(reported):
        take_over(run, team, rank, event)
    assert team.grows(asked) is grows
    told = team.wrapper_that_does_not_grow()
    assert told is None if why_not is None else why_not in str(told)


def test_a_process_that_comes_back_too_late_has_not_finished_the_script(
    run: RunDirectory, team: Team
) -> None:
    team.returning.add(1)
    for rank in range(2):
        take_over(run, team, rank, events.ExitingEvent())
    assert (team.leaving, team.finished) == ({0, 1}, {0})


def test_the_exception_that_ended_the_attempt_is_the_last_one_reported(
    run: RunDirectory, team: Team
) -> None:
    full = "OSError: [Errno 28] No space left on device"
    take_over(run, team, 1, events.FaultEvent(cause=full, kind="exception"))
    assert team.raised_last() == {}, "the ranks go on"
    take_over(run, team, 1, events.EscalationEvent(to="stop", reason="again"))
    assert team.raised_last() == {1: full}
    take_over(run, team, 1, events.FaultEvent(cause="hung: 5 s", kind="hung"))
    assert team.raised_last() == {}
