"""The fault matrix: real processes, real Gloo groups, real signals."""

from __future__ import annotations

import signal
import sysconfig
from pathlib import Path

import pytest

from .conftest import Job, lanes, lanes_with, wait_until


def returned_from(job: Job, iteration: int) -> list[int]:
    """The ranks whose function returned in ``iteration``."""
    ends = job.events("returned")
    return sorted(e["rank"] for e in ends if str(e["value"]).endswith(f"iteration {iteration}"))


def causes(job: Job) -> set[tuple[str, int]]:
    return {(e["cause"], e["first_faulty_rank"]) for e in job.events("incident")}


# --- exceptions -------------------------------------------------------------------------------


@lanes_with("faulty", [[1], [0, 2], [0, 1, 2]], ["gloo", "nccl", "nccl-eager", "mixed"])
def test_exceptions_restart_all_ranks_in_the_same_processes(job: Job, faulty: list[int]) -> None:
    assert job.start(3, "raising", on=faulty, at=[0]).wait() == {0: 0, 1: 0, 2: 0}
    assert returned_from(job, 1) == [0, 1, 2]
    incidents = job.events("incident")
    assert sorted(e["initial_rank"] for e in incidents) == [0, 1, 2], "one on each rank"
    assert {e["cause"] for e in incidents} == {"exception"}
    assert {e["first_faulty_rank"] for e in incidents} <= set(faulty)
    assert all("ValueError: boom 0" in e["traceback"] for e in incidents)
    assert all(set(e["phases_ms"]) >= {"detect", "abort", "barrier", "enter"} for e in incidents)
    job.expect_no_orphans()


def test_all_ranks_agree_on_the_incident(job: Job) -> None:
    job.start(3, "raising", on=[0, 1, 2], at=[0]).wait()
    agreed = {(e["first_faulty_rank"], tuple(e["faulty_ranks"])) for e in job.events("incident")}
    assert len(agreed) == 1


def test_where_all_would_read_too_much_one_rank_and_those_that_leave_know_everything(
    job: Job,
) -> None:
    ranks = 16
    job.start(ranks, "all_raise_much").wait()
    assert returned_from(job, 1) == sorted({*range(ranks)} - {1})
    incidents = {e["initial_rank"]: e for e in job.events("incident")}
    assert len({e["first_faulty_rank"] for e in incidents.values()}) == 1
    assert {tuple(e["ranks_lost"]) for e in incidents.values()} == {(1,)}
    for rank, incident in incidents.items():
        knows_all = rank in (0, 1)
        assert (incident["traceback"] is not None) == knows_all
        assert len(incident["faulty_ranks"]) == (ranks if knows_all else 1)


def test_an_exception_in_the_first_line_of_the_next_iterations(job: Job) -> None:
    assert set(job.start(2, "raising", on=[1], at=[0, 1, 2], first_line=True).wait().values()) == {
        0
    }
    assert returned_from(job, 3) == [0, 1]


@lanes("gloo", "nccl", extended=("nccl-eager",))
def test_too_many_faults_end_the_job_with_the_exceptions_chained(job: Job) -> None:
    codes = job.start(2, "raising", on=[1], at=list(range(9)), limit=2).wait()
    assert codes == {0: 1, 1: 1}
    chains = {e["rank"]: e["chain"] for e in job.events("raised")}
    assert chains[1][0].startswith("RestartAbort")
    assert any(link.startswith("ValueError: boom 1") for link in chains[1]), "the rank's own"
    _, _, earlier = (job.directory / "log-1").read_text().partition("of the earlier iteration")
    assert "in main" in earlier, "its traceback is a note, without the frames"
    assert "RestartAbort" in chains[0][0]
    assert any("boom 1" in link for link in chains[0]), "the other rank's exception"
    job.expect_no_orphans()


# --- ranks that leave or die ------------------------------------------------------------------


@lanes_with("on", [0, 1], ["gloo", "nccl"])
def test_a_rank_that_exits_leaves_and_the_others_go_on(job: Job, on: int) -> None:
    codes = job.start(3, "leaving", on=[on], how="exit").wait()
    assert codes == {0: 0, 1: 0, 2: 0} | {on: 5}
    assert returned_from(job, 1) == sorted({0, 1, 2} - {on})
    assert [e["rank"] for e in job.events("terminate")] == [on]
    assert {e["world"] for e in job.events("entered") if e["iteration"] == 1} == {2}
    assert causes(job) == {("left", on)}
    job.expect_no_orphans()


def test_a_keyboard_interrupt_ends_its_rank(job: Job) -> None:
    codes = job.start(2, "leaving", on=[1], how="interrupt").wait()
    assert codes == {0: 0, 1: 1}
    assert "KeyboardInterrupt" in job.events("raised")[0]["error"]


@lanes_with(
    "on,how",
    [(0, "SIGKILL"), (0, "SIGTERM"), (2, "SIGTERM"), (2, "SIGKILL")],
    ["gloo", "nccl"],
)
def test_a_killed_rank_is_not_replaced_and_the_others_go_on(job: Job, on: int, how: str) -> None:
    codes = job.start(3, "leaving", on=[on], how=how).wait()
    assert codes == {0: 0, 1: 0, 2: 0} | {on: -signal.Signals[how]}
    assert returned_from(job, 1) == sorted({0, 1, 2} - {on})
    assert causes(job) == {("died", on)}, "not the peers, whose connections broke first"
    assert {e["timeout"] for e in job.events("incident")} == {None}, "it was not ended by us"
    assert {tuple(e["ranks_lost"]) for e in job.events("incident")} == {(on,)}
    job.expect_no_orphans()


@lanes("gloo", "nccl")
def test_two_ranks_killed_at_once(job: Job) -> None:
    job.start(4, "waiting", busy=3).wait_for("entered", count=4)
    job.kill(0)
    job.kill(1)
    assert job.wait() == {0: -9, 1: -9, 2: 0, 3: 0}
    assert job.events("done", rank=3)[-1]["now"] == 1
    job.expect_no_orphans()


@lanes("gloo", "nccl")
def test_no_process_is_left_when_all_are_killed(job: Job) -> None:
    job.start(3, "waiting", busy=2).wait_for("entered", count=3)
    for rank in range(3):
        job.kill(rank)
    assert job.wait() == {0: -9, 1: -9, 2: -9}
    job.expect_no_orphans()


# --- monitor processes ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_monitor_process_that_is_lost_is_replaced_without_a_restart(
    job: Job, number: signal.Signals
) -> None:
    job.start(2, "waiting", busy=0, hang=True).wait_for("entered", count=2)
    before = job.kill_monitor(1, number)
    path = job.directory / "monitor-1.pid"
    wait_for_other_pid(path, before)
    (job.directory / "go").touch()
    assert set(job.wait().values()) == {0}
    assert returned_from(job, 0) == [0, 1]
    assert not job.events("incident")
    job.expect_no_orphans()


def wait_for_other_pid(path: Path, before: int) -> None:
    def changed() -> bool:
        text = path.read_text().strip()
        return bool(text) and int(text) != before

    wait_until(changed, "another monitor process")


def test_a_rank_killed_together_with_its_monitor_process_is_missed_by_its_neighbour(
    job: Job,
) -> None:
    job.start(3, "waiting", busy=0).wait_for("entered", count=3)
    monitor = job.monitor_process(1)
    log = job.directory / "monitor-log-0"
    wait_until(
        lambda: log.exists() and "watching the monitor process of rank 1" in log.read_text(), "link"
    )
    job.kill(1, signal.SIGSTOP)  # so that it cannot start another monitor process in between
    job.kill_monitor(1)
    job.kill(1)
    assert job.wait() == {0: 0, 1: -9, 2: 0}, monitor
    assert returned_from(job, 1) == [0, 2]
    assert causes(job) == {("lost", 1)}
    job.expect_no_orphans()


# --- hangs ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleep", "lock", "livelock", "store"])
def test_a_hang_that_releases_the_gil_is_interrupted_and_the_rank_survives(
    job: Job, how: str
) -> None:
    assert job.start(2, "hanging", on=[1], how=how).wait() == {0: 0, 1: 0}
    assert len(returned_from(job, 1)) == 2 or len(job.events("returned")) == 2
    incidents = job.events("incident")
    assert {e["cause"] for e in incidents} == {"soft-timeout"}
    assert all("Main thread" in e["traceback"] and "in main" in e["traceback"] for e in incidents)
    assert not any(e["exception"] for e in incidents)
    assert {e["timeout"]["limit"] for e in incidents} == {"soft"}
    assert {e["timeout"]["clock"] for e in incidents} <= {"main-thread", "ping"}
    job.expect_no_orphans()


@pytest.mark.slow
@lanes_with(
    "how,evidence", [("gil", "in gil_holding_sleep"), ("stop", "hard timeout")], ["gloo", "nccl"]
)
def test_a_hang_that_nothing_can_interrupt_is_ended_at_the_hard_timeout(
    job: Job, how: str, evidence: str
) -> None:
    if how == "gil" and sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("there is no GIL to hold")
    codes = job.start(2, "hanging", on=[1], how=how).wait()
    assert codes[0] == 0
    assert codes[1] in (-signal.SIGTERM, -signal.SIGKILL)
    lost = [e for e in job.events("incident") if e["ranks_lost"] == [1]]
    assert {e["cause"] for e in lost} == {"died"}
    assert all("hard timeout" in e["summary"] for e in lost)
    assert {(e["timeout"]["limit"], e["timeout"]["clock"]) for e in lost} == {("hard", "python")}
    assert all(evidence in f"{e['summary']} {e['traceback']}" for e in lost)
    job.expect_no_orphans()
