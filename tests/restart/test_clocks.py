"""The wall clock is set while a job runs: no rank is lost over it, and no duration is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ncclops.restart._instant import Instant
from ncclops.restart.attribution import Fault, FaultKind
from tests.conftest import clean_environ

from .rank_processes import Ranks, processes
from .test_faults import wait_for_other_pid

HOUR_S = 3600


@pytest.fixture(scope="session")
def clock_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library to preload, which obeys the file that CLOCK_STUB_FILE names."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the clock's stand-in with")
    library = tmp_path_factory.mktemp("clock") / "clock_stub.so"
    source = Path(__file__).with_name("clock_stub.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
    return library


@pytest.mark.slow
def test_a_clock_that_is_set_costs_no_rank_and_no_phase_is_off(
    tmp_path: Path, clock_stub: Path
) -> None:
    """In the function, on the way from a fault to the barrier, and when one rank has returned;
    forwards and backwards each."""
    preload = {"LD_PRELOAD": str(clock_stub), "CLOCK_STUB_FILE": str(tmp_path / "clock")}
    began = time.monotonic()
    with processes(tmp_path, 2) as ranks:
        ranks.start(preload)
        ranks.wait_for_all("entered 0")
        watching, path = "watching the monitor process of rank 1", tmp_path / "monitor-1.pid"
        for number, ahead_s in enumerate((HOUR_S, -HOUR_S), 1):
            ranks.wait_for("monitor-log-0", watching, number)
            set_clock(tmp_path, ahead_s)
            os.kill(monitor := int(path.read_text()), signal.SIGKILL)
            wait_for_other_pid(path, monitor)
        ranks.wait_for("monitor-log-0", watching, 3)
        (tmp_path / "fail-1").touch()
        set_while_rank_1_waits(ranks, 0)
        ranks.wait_for_all("entered 1")
        ranks.go()
        set_while_rank_1_waits(ranks, 1)
        assert ranks.wait() == [0, 0]
        assert set(ranks.incidents()) == {"incident: ValueError: boom; lost ()"}
        logs = [ranks.log(f"log-{rank}").splitlines() for rank in range(2)]
    lines = [line for log in logs for line in log if line.startswith("phases: ")]
    phases = [json.loads(line.removeprefix("phases: ")) for line in lines]
    assert len(phases) == 2
    assert all(ms >= 0 for each in phases for ms in each.values())
    # They are parts of what the test has taken.
    assert all(sum(each.values()) < 1000 * (time.monotonic() - began) for each in phases)


def set_clock(directory: Path, ahead_s: int) -> None:
    """At once: the file is never empty, which would set it right."""
    (directory / "new-clock").write_text(f"{ahead_s}")
    (directory / "new-clock").replace(directory / "clock")


def set_while_rank_1_waits(ranks: Ranks, iteration: int) -> None:
    """For rank 0, which is about to leave ``iteration``, and does so after that."""
    ranks.wait_for("log-1", f"waits in {iteration}\n")
    for number, ahead_s in enumerate((HOUR_S, -HOUR_S), 1):
        set_clock(ranks.directory, ahead_s)
        ranks.wait_for("log-1", f"the clock is set in {iteration}: waits ", number)
    assert ranks.log("log-1").count(f"the clock is set in {iteration}: waits True\n") == 2
    assert f"entered {iteration + 1}" not in ranks.log("log-0") + ranks.log("log-1")
    (ranks.directory / f"leave-{iteration}").touch()


def _fault(instant: Instant | None, recorded_after_s: float | None = None) -> Fault:
    return Fault(
        FaultKind.DIED,
        initial_rank=1,
        rank=1,
        iteration=0,
        at=1e9,
        summary="x",
        instant=instant,
        recorded_after_s=recorded_after_s,
    )


def test_how_long_a_fault_was_unknown_is_measured_by_one_clock() -> None:
    seen = Instant(1000.0, "here")
    assert _fault(Instant(999.5, "here"), 0.2).known_after_s(seen) == 0.5
    assert _fault(Instant(999.5, "there"), 0.2).known_after_s(seen) == 0.2
    assert _fault(Instant(1000.5, "here")).known_after_s(seen) == 0
    assert _fault(None).known_after_s(seen) == 0


def test_a_fault_that_another_host_records_has_no_time_until_then() -> None:
    assert _fault(Instant(5.0, "another host")).being_recorded().recorded_after_s is None
    now = Instant.now()
    assert _fault(now).being_recorded().recorded_after_s is not None


def test_a_fault_comes_out_of_the_store_as_it_was_put_in() -> None:
    fault = _fault(Instant.now()).being_recorded()
    assert Fault.from_json(fault.to_json()) == fault


def test_processes_of_one_host_share_a_clock(starts_processes: None) -> None:
    program = "from ncclops.restart._instant import Instant; print(*Instant.now())"
    before = Instant.now()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    monotonic_s, clock = done.stdout.split()
    elapsed_s = before.seconds_until(Instant(float(monotonic_s), clock))
    assert elapsed_s is not None and elapsed_s > 0
