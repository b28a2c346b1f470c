"""A rank is watched, or goes on unwatched, where a monitor process cannot be what it should be."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ncclops.restart.progress_watchdog import _MOST_REPLACEMENTS
from ncclops.testing._processes import send

from .conftest import Job, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("then", "how"), [("leaving", "SIGKILL"), ("hanging", "gil")], ids=["killed", "hangs"]
)
def test_a_death_is_noticed_and_a_hang_ended_where_pidfds_are_refused(
    job: Job, then: str, how: str
) -> None:
    probe = [sys.executable, str(Path(__file__).with_name("refusal.py"))]
    if b"refused" not in subprocess.run(probe, capture_output=True).stdout:
        pytest.skip("no seccomp filter can be set here")
    codes = job.start(3, "fault_programs:without_pidfds", then=then, on=[1], how=how).wait()
    assert (codes[0], codes[2]) == (0, 0)
    assert codes[1] < 0
    assert {e["cause"] for e in job.events("incident")} == {"died"}
    assert {e["first_faulty_rank"] for e in job.events("incident")} == {1}
    log = (job.directory / "log-0").read_text()
    assert log.count("pidfd_open is refused") == 1
    assert "seccomp profile" in log
    job.expect_no_orphans()


def test_a_monitor_process_that_is_killed_again_and_again_is_given_up(job: Job) -> None:
    job.start(2, "store_programs:working").wait_for("entered", count=2)
    killed: set[int] = set()
    for _ in range(_MOST_REPLACEMENTS + 1):
        wait_until(lambda: job.monitor_process(1) not in killed, "a replacement")
        killed.add(job.kill_monitor(1))
    log = job.directory / "log-1"
    wait_until(lambda: "continues without a monitor process" in log.read_text(), "the error")
    assert f"replaced {_MOST_REPLACEMENTS} times in 600 s" in log.read_text()
    (job.directory / "go").touch()
    assert job.wait() == {0: 0, 1: 0}
    assert job.events("incident") == []
    job.expect_no_orphans()


def test_a_host_that_stands_still_for_longer_than_the_hard_timeout_costs_no_rank(job: Job) -> None:
    """As a virtual machine does that is paused. Main processes are the first to go on, and one
    monitor process has only just been started."""
    job.start(2, "fault_programs:waiting_for_a_busy_rank").wait_for("entered", count=2)
    time.sleep(0.5)  # rank 1 waits: its main thread does not move from here on
    mains, others = set(job.pids.values()), set(job.processes()) - set(job.pids.values())
    killed = job.kill_monitor(1)
    while job.monitor_process(1) == killed:  # at once: it is up in 20 ms
        pass
    others = others - {killed} | {job.monitor_process(1)}
    send(signal.SIGSTOP, mains | others)
    time.sleep(9)
    send(signal.SIGCONT, mains)
    time.sleep(0.5)
    send(signal.SIGCONT, others)
    time.sleep(0.5)  # they look at the clocks of the main processes
    (job.directory / "go").touch()
    assert job.wait() == {0: 0, 1: 0}
    assert job.events("incident") == []
    job.expect_no_orphans()
