"""What the wrapper offers beyond surviving: callbacks, reserves, stores, phases, records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port

from .conftest import Job, wait_until


@pytest.mark.parametrize("which", ["initialize", "health_check"])
def test_a_callback_that_fails_before_the_function_is_a_fault(job: Job, which: str) -> None:
    assert set(job.start(2, "failing_callbacks", which=which).wait().values()) == {0}
    assert {e["iteration"] for e in job.events("done")} == {1}
    assert {e["first_faulty_rank"] for e in job.events("incident")} == {1}


@pytest.mark.parametrize("which", ["finalize", "restart_health_check"])
def test_a_rank_that_cannot_be_cleaned_up_leaves(job: Job, which: str) -> None:
    assert job.start(3, "failing_callbacks", which=which).wait() == {0: 0, 1: 1, 2: 0}
    chain = job.events("raised", rank=1)[0]["chain"]
    assert any(f"{which} failed" in link for link in chain)
    assert any("boom" in link for link in chain), "what the function raised is not lost"
    assert len(job.events("done")) == 2
    job.expect_no_orphans()


def test_a_reserve_takes_over(job: Job) -> None:
    assert job.start(3, "reserves").wait() == {0: -9, 1: 0, 2: 0}
    entered = [(e["rank"], e["iteration"], e["now"], e["world"]) for e in job.events("entered")]
    assert (2, 1, "1", 2) in entered
    assert all(rank != 2 for rank, iteration, *_ in entered if iteration == 0)


def test_a_reserve_that_was_not_needed_returns_none(job: Job) -> None:
    job.start(3, "own_assignment").wait()
    now = {e["rank"]: e["now"] for e in job.events("entered") if e["iteration"] == 1}
    assert now == {0: 1, 2: 0} or now == {0: 0, 2: 1}


def test_ranks_without_a_place_are_discarded(job: Job) -> None:
    assert job.start(4, "groups_of_two").wait() == {0: -9, 1: 1, 2: 0, 3: 0}
    assert "RankDiscarded" in job.events("raised", rank=1)[0]["error"]
    assert {e["now"] for e in job.events("done")} == {0, 1}
    job.expect_no_orphans()


@pytest.mark.parametrize("kind", ["file", "own"])
def test_stores_of_the_user(job: Job, kind: str) -> None:
    assert set(job.start(2, "stores", kind=kind, port=free_port()).wait().values()) == {0}
    assert {e["iteration"] for e in job.events("done")} == {2}


@pytest.fixture
def server(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """A store that runs elsewhere, and that the job is pointed to."""
    port = free_port()
    command = [sys.executable, "-m", "ncclops.restart.store_server", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert str(port) in process.stdout.readline().decode()
            job.env = {"NCCLOPS_STORE": f"127.0.0.1:{port}", "MASTER_ADDR": "", "MASTER_PORT": ""}
            yield process
        finally:
            process.kill()


def test_a_store_that_runs_elsewhere(job: Job, server: subprocess.Popen[bytes]) -> None:
    assert set(job.start(2, "stores", kind="default").wait().values()) == {0}
    assert server.poll() is None, "it stays until it is asked to end"
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0


def test_no_rank_needs_the_store_once_all_have_finished(
    job: Job, server: subprocess.Popen[bytes]
) -> None:
    """Which is why the default store names no critical rank, and no rank waits for the others."""
    job.start(2, "dropin_programs:slow_completion")
    job.wait_for("returned", rank=0)
    job.wait_for("completing", rank=1)
    server.kill()
    server.wait()
    (job.directory / "server-is-gone").touch()
    assert set(job.wait().values()) == {0}
    assert {e["value"] for e in job.events("returned")} == {"iteration 1"}
    job.expect_no_orphans()


def test_a_rank_that_does_not_finish(job: Job) -> None:
    assert set(job.start(2, "unfinished").wait().values()) == {0}
    assert {e["cause"] for e in job.events("incident")} == {"completion-timeout"}


@pytest.mark.slow
def test_a_phase_has_its_own_timeouts(job: Job) -> None:
    assert set(job.start(2, "compiling").wait().values()) == {0}
    assert len(job.events("compiled")) == 2, "the phase may last"
    assert {e["cause"] for e in job.events("incident")} == {"soft-timeout"}


@pytest.mark.slow
def test_timeouts_change_on_all_ranks_together(job: Job) -> None:
    assert set(job.start(3, "changing_timeouts").wait().values()) == {0}
    assert {e["cause"] for e in job.events("incident")} == {"soft-timeout"}


@pytest.mark.slow
@pytest.mark.extended
def test_hang_protection_can_be_switched_off(job: Job) -> None:
    assert set(job.start(2, "unprotected").wait().values()) == {0}
    incidents = {(e["iteration"], e["cause"]) for e in job.events("incident")}
    assert incidents == {(0, "exception"), (1, "soft-timeout")}, "protected again after sections"


def test_an_atomic_section_is_finished_before_the_restart(job: Job) -> None:
    assert set(job.start(2, "checkpointing").wait().values()) == {0}
    assert len(job.events("written")) == 1
    assert not job.events("too far")


@pytest.mark.slow
def test_nothing_accumulates_over_restarts(job: Job) -> None:
    assert set(job.start(2, "many_restarts").wait().values()) == {0}
    for rank in (0, 1):
        holds = {e["iteration"]: e for e in job.events("holds", rank)}
        # a rank may be interrupted before it has noted them
        assert max(holds) == 40
        for what in ("fds", "threads", "hooks"):
            # the least of several: a thread that is just ending may be counted in any single one
            early = min(held[what] for n, held in holds.items() if 5 <= n < 15)
            late = min(held[what] for n, held in holds.items() if n >= 30)
            assert late <= early, what
    job.expect_no_orphans()


@pytest.mark.parametrize(("how", "code"), [("return", 11), ("raise", 12), ("exit", 13)])
def test_a_forked_child_that_comes_out_of_the_function_does_not_touch_its_parents_job(
    job: Job, how: str, code: int
) -> None:
    assert job.start(2, "forking", how=how).wait() == {0: 0, 1: 0}
    assert [event["code"] for event in job.events("child")] == [code]
    assert not job.events("incident")
    job.expect_no_orphans()


def test_calls_are_independent_and_repeatable(job: Job) -> None:
    job.start(2, "repeated_calls").wait()
    assert [e["value"] for e in job.events("returned")] == [["a 0 1", "b 1 1"]] * 2
    job.expect_no_orphans()


@pytest.mark.parametrize("snapshots", [False, True])
def test_incidents_are_written_once_for_the_job_and_by_the_rank_that_left(
    job: Job, snapshots: bool
) -> None:
    job.start(2, "written_incidents", snapshots=snapshots).wait()
    directory = job.directory / "incidents" / "0"
    names = sorted(p.name for p in directory.iterdir())
    ranks = ["rank0", "rank1"] if snapshots else []
    assert names == ["incident.json", "left-rank1.json", *ranks]
    incident = json.loads((directory / "incident.json").read_text())
    assert incident["schema"] == "ncclops.incident/1"
    assert incident["cause"] == "left"
    assert incident["ranks_lost"] == [1]
    assert (incident["world_size_before"], incident["world_size"]) == (2, 1)
    assert "SystemExit" in incident["traceback"]


def test_the_monitor_process_is_light(job: Job) -> None:
    """It runs without torch, and in a session of its own, so that a Ctrl-C does not reach it."""
    job.start(1, "waiting", busy=0).wait_for("entered")
    monitor = job.monitor_process(0)
    maps = wait_until(Path(f"/proc/{monitor}/maps").read_text, "its memory map")
    assert "torch" not in maps
    assert os.getsid(monitor) == monitor
    (job.directory / "go").touch()
    assert job.wait() == {0: 0}
    job.expect_no_orphans()
