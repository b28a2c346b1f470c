"""The workers of one attempt: whose failure ends it, who is blamed first, when they may go."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ncclops.agent.team import Team
from ncclops.agent.worker_messages import take_over
from ncclops.agent.workers import Exit, Worker
from ncclops.decision.outcome import describe_ending
from ncclops.decision.retrying import Escalated
from ncclops.host.oom_kills import RULED_OUT
from ncclops.record.events import FinishedEvent, RestartEvent, ScriptFailedEvent
from ncclops.record.run_directory import RunDirectory

GOOD, BAD, KILLED = Exit(0, None), Exit(1, None), Exit(None, "SIGKILL")


class Process:
    """In the place of a worker's process; a worker that is not reaped asks for no more of it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.signals: list[signal.Signals] = []

    def send_signal(self, signum: signal.Signals) -> None:
        self.signals.append(signum)


class Made:
    """A team of four, whose workers end as the test says."""

    def __init__(self, *, in_process: bool) -> None:
        self.processes = [Process() for _ in range(4)]
        self.team = Team(restarts_in_process=in_process)
        self._sockets = [socket.socketpair() for _ in self.processes]
        for rank, (process, (ours, _)) in enumerate(
            zip(self.processes, self._sockets, strict=True)
        ):
            self.team.workers.append(Worker(rank, cast(Any, process), ours))

    def end(self, **exits: Exit) -> Team:
        """``rank2=Exit(...)`` and so on, in the order in which they end."""
        for name, how in exits.items():
            worker = self.team.workers[int(name.removeprefix("rank"))]
            worker.exit, worker.ended = how, worker.started + 5
            self.team.ended.append(worker)
        return self.team

    def close(self) -> None:
        for worker in self.team.workers:
            os.close(worker.pidfd)
        for pair in self._sockets:
            for each in pair:
                each.close()


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    made = Made(in_process=getattr(request, "param", False))
    yield made
    made.close()


def blamed(team: Team) -> int | None:
    worker = team.final_failure()
    return None if worker is None else worker.rank


in_place = pytest.mark.parametrize("made", [True], indirect=True)


def test_without_restarts_in_place_the_first_failure_ends_the_attempt(made: Made) -> None:
    assert blamed(made.end(rank3=GOOD)) is None
    assert blamed(made.end(rank2=BAD, rank0=KILLED)) == 2
    assert made.team.ends_all(made.team.workers[2])


@in_place
def test_the_others_go_on_without_a_rank_that_the_restart_core_looked_after(made: Made) -> None:
    made.team.entered = {1, 2}
    assert blamed(made.end(rank1=KILLED)) is None
    assert not made.team.ends_all(made.team.workers[1])
    assert blamed(made.end(rank3=BAD)) == 3, "it never reached the point from which they can"
    assert made.team.ends_all(made.team.workers[3])


@in_place
def test_no_other_rank_goes_on_without_one_that_has_become_another_program(made: Made) -> None:
    made.team.entered = made.team.by_themselves = {0, 1, 2, 3}
    assert blamed(made.end(rank1=BAD)) == 1
    assert made.team.ends_all(made.team.workers[1])
    assert blamed(made.end(rank0=GOOD, rank2=GOOD, rank3=GOOD)) == 1


@in_place
def test_once_the_restart_core_has_given_up_any_failure_ends_the_attempt(made: Made) -> None:
    made.team.entered = {0, 1, 2, 3}
    made.end(rank1=BAD)
    assert blamed(made.team) is None
    made.team.escalation = Escalated(to="process", reason="three times the same", failure=None)
    assert blamed(made.team) == 1


@in_place
def test_a_node_without_a_rank_at_work_waits_for_one_to_return_while_others_work(
    made: Made,
) -> None:
    others = [True]
    made.team.others_work = lambda: bool(others)
    made.team.entered = {0, 1, 2, 3}
    made.end(rank0=KILLED, rank1=KILLED, rank2=KILLED, rank3=KILLED)
    assert made.team.goes_on(), "a new process has something to return to"
    assert made.team.is_over()
    assert blamed(made.team) == 0
    made.team.returning = {3}
    assert not made.team.is_over()
    assert blamed(made.team) is None
    others.clear()
    assert made.team.is_over()
    assert blamed(made.team) == 0


@in_place
def test_a_job_that_those_who_were_left_have_finished_has_not_failed(made: Made) -> None:
    made.team.entered = {0, 1, 2, 3}
    assert blamed(made.end(rank1=KILLED, rank0=GOOD, rank2=GOOD, rank3=GOOD)) is None


@in_place
def test_a_job_that_no_worker_has_finished_has_failed(made: Made) -> None:
    made.team.entered = {0, 1, 2, 3}
    assert blamed(made.end(rank1=KILLED, rank0=BAD, rank2=BAD, rank3=BAD)) == 1


def test_the_rank_that_the_restart_core_blames_comes_before_those_that_ended_earlier(
    made: Made,
) -> None:
    made.end(rank2=BAD, rank0=BAD)
    made.team.last_faulty = 0
    assert blamed(made.team) == 0
    assert [ending.rank for ending in made.team.blamed_first()] == [0, 2, 1, 3]


@pytest.mark.parametrize("made", [True, False], indirect=True)
def test_the_death_of_a_process_whose_script_had_ended_well_is_no_failure(made: Made) -> None:
    made.team.entered = {0, 1, 2, 3}
    made.team.finished = {0, 1, 2, 3}
    assert blamed(made.end(rank1=KILLED, rank0=KILLED)) is None
    assert made.team.failed_exits() == {}
    assert [ending.rank for ending in made.team.endings() if ending.ok] == [1, 0]
    assert made.end(rank2=BAD).failed_exits() == {2: BAD}, "its exit code is its own word"


def test_an_exit_with_0_after_the_script_has_failed_is_a_failure(made: Made) -> None:
    """As where a callback at exit calls ``os._exit(0)``, of which Python knows no more."""
    made.team.script_failures = {1: ScriptFailedEvent(), 2: ScriptFailedEvent()}
    made.team.finished = {2}  # in another start of it
    assert blamed(made.end(rank0=GOOD, rank2=GOOD)) is None
    assert blamed(made.end(rank1=GOOD)) == 1
    assert [ending.rank for ending in made.team.endings() if ending.ok] == [0, 2]
    assert [describe_ending(ending) for ending in made.team.endings()[1:3]] == [
        "exited with code 0",
        "exited with code 0 before its script had ended well",
    ]


@in_place
def test_a_script_that_has_failed_and_started_again_may_exit_with_0(made: Made) -> None:
    made.team.entered = {0, 1, 2, 3}
    made.team.script_failures = {1: ScriptFailedEvent()}
    assert blamed(made.end(rank1=GOOD)) is None
    made.team.escalation = Escalated(to="process", reason="three times the same", failure=None)
    assert blamed(made.team) == 1


def test_endings_are_in_their_order_and_then_come_those_that_run(made: Made) -> None:
    endings = made.end(rank2=KILLED, rank0=GOOD).endings()
    assert [(e.rank, e.exit_code, e.signal, e.seconds) for e in endings] == [
        (2, None, "SIGKILL", 5.0),
        (0, 0, None, 5.0),
        (1, None, None, None),
        (3, None, None, None),
    ]


def test_who_was_asked_to_stop_has_not_failed_by_itself_and_who_hung_was_not_asked(
    made: Made,
) -> None:
    made.team.asked_to_stop, made.team.hung = {1, 2}, {2}
    team = made.end(rank0=BAD, rank1=KILLED, rank2=KILLED, rank3=GOOD)
    assert team.failed_exits() == {0: BAD}
    assert {ending.rank: ending.asked_to_stop for ending in team.endings()} == {
        0: False,
        1: True,
        2: False,
        3: False,
    }


def test_ranks_that_wait_for_each_other_are_released_once_all_that_run_wait(made: Made) -> None:
    made.end(rank3=GOOD)
    made.team.ready_to_end = {0, 1}
    made.team.release()
    assert [process.signals for process in made.processes] == [[], [], [], []]
    made.team.ready_to_end.add(2)
    made.team.release()
    asked = [signal.SIGTERM]
    assert [process.signals for process in made.processes] == [asked, asked, asked, []]
    made.team.release()
    assert made.processes[0].signals == asked, "once is enough"


@in_place
def test_an_end_that_we_have_caused_is_no_evidence(made: Made) -> None:
    team = made.end(rank1=KILLED, rank2=KILLED, rank3=BAD)
    team.ended_for_hang.add(1)
    team.why_ended[2] = "hard timeout"
    assert team.failed_exits() == {3: BAD}


@in_place
def test_a_job_that_is_done_is_done_on_all_ranks_that_run(made: Made, tmp_path: Path) -> None:
    """As one of them says; not on a rank that had died before."""
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n1")
    team = made.end(rank3=KILLED)
    take_over(run, team, 1, FinishedEvent())
    assert (team.finished, team.leaving) == ({0, 1, 2}, {1})


@in_place
def test_a_new_process_that_never_took_part_has_not_finished(made: Made, tmp_path: Path) -> None:
    """The others have, without its rank: that is lost, as the end of its last process says."""
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n1")
    made.team.entered = {0, 1, 2, 3}
    made.end(rank1=KILLED)
    made.team.returning = {1}
    take_over(run, made.team, 0, FinishedEvent())
    assert made.team.finished == {0, 2, 3}
    made.end(rank0=GOOD, rank2=GOOD, rank3=GOOD)
    assert [ending.rank for ending in made.team.endings() if not ending.ok] == [1]


@in_place
def test_a_rank_that_is_back_is_judged_by_its_new_process_alone(made: Made) -> None:
    made.team.entered = {0, 1, 2, 3}
    made.team.ended_for_hang = {1}
    made.end(rank1=KILLED)
    made.team.returning = {1}
    (before,) = made.team.ended
    made.team.has_returned(1)
    os.close(before.pidfd)
    assert made.team.ended == []
    assert made.team.ended_for_hang == set()


@in_place
def test_a_job_that_is_done_is_not_done_on_a_rank_that_was_lost(made: Made, tmp_path: Path) -> None:
    """Its process may be there still, and be ended by us: its script has not ended well."""
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n1")
    take_over(run, made.team, 0, RestartEvent(ranks_lost=[3]))
    take_over(run, made.team, 0, FinishedEvent())
    team = made.end(rank0=GOOD, rank1=GOOD, rank2=GOOD, rank3=KILLED)
    assert team.finished == {0, 1, 2}
    assert team.has_failed(team.workers[3])


@in_place
def test_a_rank_that_was_lost_takes_no_part_whether_its_process_runs_or_not(
    made: Made, tmp_path: Path
) -> None:
    """By exec it may be another program, which makes no steps: that is no hang of the others."""
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n1")
    take_over(run, made.team, 0, RestartEvent(ranks_lost=[1, 3]))
    made.end(rank2=KILLED)
    assert [worker.rank for worker in made.team.taking_part()] == [0]
    take_over(run, made.team, 0, RestartEvent(ranks_returned=[1]))
    assert [worker.rank for worker in made.team.taking_part()] == [0, 1]


@pytest.mark.parametrize("asked", [False, True], ids=["by the kernel", "by the agent"])
def test_the_oom_killer_explains_the_end_of_a_killed_rank_only(made: Made, asked: bool) -> None:
    team = made.end(rank0=BAD, rank2=KILLED)
    team.asked_to_stop = {2} if asked else set()
    for worker in (team.workers[0], team.workers[2]):
        team.note_memory(worker, None)
    assert not team.explained
    for worker in (team.workers[0], team.workers[2]):
        team.note_memory(worker, "out of memory")
    assert team.explained == team.out_of_memory == ({} if asked else {2: "out of memory"})


@pytest.mark.parametrize("asked", [False, True], ids=["by somebody", "by the agent"])
def test_a_kill_that_is_not_the_oom_killers_is_told_as_one_from_outside(
    made: Made, asked: bool
) -> None:
    team = made.end(rank0=BAD, rank2=KILLED)
    team.asked_to_stop = {2} if asked else set()
    for worker in (team.workers[0], team.workers[2]):
        team.note_memory(worker, None, is_ruled_out=True)
    assert team.told_by_kernel() == ({} if asked else {2: RULED_OUT})
    assert team.explanations() == ({} if asked else {2: "from outside"})
    team.why_ended[2] = "no progress for 90 s"
    assert not team.told_by_kernel()
    assert team.explanations() == team.why_ended
