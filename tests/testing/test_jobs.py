"""The harness with real ranks: faults strike, results come back, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from ncclops.errors import UsageError
from ncclops.testing import (
    DeadlineExceeded,
    Fault,
    FaultDidNotStrike,
    HarnessError,
    JobFactory,
    LeftBehind,
    RankFailed,
)
from tests.conftest import LIMIT_S, REPOSITORY, clean_environ
from tests.testing import programs
from tests.testing.programs import SHORT, Greeting

pytestmark = pytest.mark.slow

STEPS = 10
UNDISTURBED = float(sum(step % 7 for step in range(STEPS)))
BRIEFLY = timedelta(seconds=2)
# An operation of the store is given up, and others asked, after a part of the barrier's timeout.
SOON_ASKED = {**SHORT, "barrier_timeout": timedelta(seconds=20)}


def test_the_example_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "testing.md").read_text()
    program, test, *_ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "test_train.py").write_text(test)
    done = run_pytest(tmp_path, "test_train.py")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_the_plugin_imports_neither_torch_nor_the_harness(tmp_path: Path) -> None:
    # pytest imports pdb, which imports asyncio from Python 3.14 on
    heavy = {"torch", "ncclops.testing.job"} | (
        {"asyncio"} if sys.version_info < (3, 14) else set()
    )
    (tmp_path / "test_imports.py").write_text(
        "import sys\n\ndef test_it():\n    assert 'ncclops.testing.plugin' in sys.modules\n"
        f"    assert not {heavy} & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path, "test_imports.py")
    assert done.returncode == 0, done.stdout


def run_pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # anyio, which libraries of the trainers need, has a plugin that imports asyncio.
    plugin = ["-p", "ncclops.testing.plugin", "-p", "no:anyio"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *arguments],
        cwd=directory,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault.exception(1, "step", 3), "exception"),
        pytest.param(
            Fault.exception(1, "step", 3, error=OSError(28, "disk full")),
            "exception",
            marks=pytest.mark.extended,
        ),
        (Fault.exit(1, "step", 3, code=4), "left"),
        pytest.param(Fault.hang(1, "step", 3), "soft-timeout", marks=pytest.mark.extended),
        (Fault.gil_hang(1, "step", 3), "died"),
        (Fault.kill(1, "step", 3), "died"),
        pytest.param(Fault.stop(1, "step", 3), "died", marks=pytest.mark.extended),
        pytest.param(Fault.exception(1, "initialize"), "exception", marks=pytest.mark.extended),
        pytest.param(Fault.exception(1, "health_check"), "exception", marks=pytest.mark.extended),
        (Fault.lost_host(1, "step", 3), "lost"),
    ],
    ids=str,
)
def test_a_fault_strikes_once_and_the_others_come_to_the_undisturbed_result(
    ncclops_job: JobFactory, tmp_path: Path, fault: Fault, cause: str
) -> None:
    # A lost host is noticed by its neighbour in the ring, which takes a moment to come up.
    pause_s = 2.0 if cause == "lost" else 0.0
    arguments = (tmp_path / "checkpoint", STEPS, pause_s)
    job = ncclops_job(programs.train, world_size=3, args=arguments, faults=[fault], wrapper=SHORT)
    result = job.run()
    assert [strike.fault.kind for strike in result.strikes] == [fault.kind]
    assert result.lost == result.taken
    assert result.value == UNDISTURBED
    incident = result.incidents[-1]
    assert incident.cause == cause
    assert incident.first_faulty_rank == 1
    if fault.error is not None:
        assert "disk full" in result.incidents[0].summary
    if fault.code:
        assert result.ranks[1].exit_code == fault.code


@pytest.mark.parametrize("place", ["abort", "finalize", "restart_health_check", "barrier"])
def test_a_rank_is_killed_on_the_way_to_a_restart(
    ncclops_job: JobFactory, tmp_path: Path, place: str
) -> None:
    # the first barrier is before iteration 0
    faults = [Fault.exception(0, "step", 3), Fault.kill(1, place, 2 if place == "barrier" else 1)]
    # One that is killed in the middle of a barrier may leave a peer in Gloo, which is ended then.
    arguments = (tmp_path / "checkpoint", STEPS, 0.0, 0.1)
    job = ncclops_job(programs.train, world_size=3, args=arguments, faults=faults, wrapper=SHORT)
    result = job.run()
    assert result.lost == {1}
    assert result.value == UNDISTURBED


def test_a_host_is_lost_before_the_ring_is_up(ncclops_job: JobFactory, tmp_path: Path) -> None:
    """In the first barrier: the address of its monitor process is known, and it never answered."""
    job = ncclops_job(
        programs.train,
        world_size=3,
        args=(tmp_path / "checkpoint", STEPS),
        faults=[Fault.lost_host(1, "barrier", 1)],
        wrapper={**SHORT, "barrier_timeout": timedelta(minutes=10)},
    )
    result = job.run()
    assert result.lost == {1}
    assert result.value == UNDISTURBED


@pytest.mark.parametrize(
    "fault",
    [
        Fault.slow_store(1, "step", 3, delay=timedelta(milliseconds=100), duration=BRIEFLY),
        Fault.paused_store(1, "step", 3, duration=BRIEFLY),
        Fault.lost_connection(1, "step", 3),
        Fault.lost_connection(1, "step", 3, silent=True),
    ],
    ids=str,
)
def test_what_goes_wrong_on_the_way_to_the_store_costs_no_rank(
    ncclops_job: JobFactory, tmp_path: Path, fault: Fault
) -> None:
    faults = [fault, Fault.exception(0, "step", 4)]  # what needs the store
    arguments = (tmp_path / "checkpoint", STEPS)
    job = ncclops_job(
        programs.train, world_size=2, args=arguments, faults=faults, wrapper=SOON_ASKED
    )
    result = job.run()
    assert result.lost == frozenset()
    assert result.restarts == 1
    assert result.value == UNDISTURBED
    assert [strike.fault for strike in result.strikes] == faults


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_a_rank_that_is_cut_off_from_the_store_leaves(
    ncclops_job: JobFactory, tmp_path: Path, silent: bool
) -> None:
    faults = [Fault.cut_off(1, "step", 3, silent=silent), Fault.exception(0, "step", 4)]
    arguments = (tmp_path / "checkpoint", STEPS)
    job = ncclops_job(
        programs.train, world_size=3, args=arguments, faults=faults, wrapper=SOON_ASKED
    )
    result = job.run()
    assert result.lost == result.taken == {1}
    assert result.value == UNDISTURBED
    # One that waits for answers that do not come may be ended at its hard timeout before.
    ended = result.ranks[1].exit_code == -signal.SIGTERM
    assert (silent and ended) or result.ranks[1].chain[0].startswith("StoreGone")


def test_connections_to_the_store_are_reset(ncclops_job: JobFactory) -> None:
    with ncclops_job(programs.stay, world_size=2, proxied_store=True).start() as job:
        job.wait_for("there", count=2)
        mine, other = (connect(job.store.addresses[rank]) for rank in (1, 0))
        with mine, other:
            job.store.lose_connections(1)
            with pytest.raises(ConnectionResetError):
                mine.recv(1)
            other.settimeout(0.1)
            with pytest.raises(TimeoutError):
                other.recv(1)
            connect(job.store.addresses[1]).close()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    end = socket.create_connection((host, int(port)), timeout=20)
    # TCPStore's greeting and nothing else: a byte for the kind and a number that it expects
    end.sendall(b"\0" + (0x3C85F7CE).to_bytes(4, "little"))
    time.sleep(0.2)  # until the proxy has passed it on, which nothing announces
    return end


# --- what a test is given ---------------------------------------------------------------------


def test_values_notes_and_output_come_back(ncclops_job: JobFactory) -> None:
    job = ncclops_job(
        programs.greet, world_size=2, args=(Greeting("all"),), env={"SPOKEN": "aloud"}
    )
    result = job.run()
    assert result.values == {rank: ("hello, all", rank, "aloud") for rank in (0, 1)}
    assert type(result.values[0][0]) is Greeting
    notes = result.notes_of("greeted", rank=1)
    assert [(n.rank, n.fields["name"], len(n.fields["large"])) for n in notes] == [
        (1, "all", 300_000)
    ]
    assert "hello from rank 1" in result.ranks[1].log_tail()
    assert result.incidents == ()


def test_errors_come_back_with_their_codes(ncclops_job: JobFactory) -> None:
    ranks = ncclops_job(programs.fail, world_size=2).run().ranks
    assert (ranks[0].exit_code, ranks[0].error) == (1, "ValueError('second')")
    assert ranks[0].chain == ("ValueError: second", "KeyError: 'first'")
    assert "in fail" in (ranks[0].traceback or "")
    assert (ranks[1].exit_code, ranks[1].returned) == (5, False)


def test_a_job_that_does_not_end_in_time_shows_the_stacks(ncclops_job: JobFactory) -> None:
    job = ncclops_job(programs.stay, world_size=2, deadline=BRIEFLY)
    with pytest.raises(DeadlineExceeded, match=r"(?s)not ended: 0, 1.*in stay.*in stay"):
        job.run()


def test_a_note_that_cannot_come_any_more_is_not_waited_for(ncclops_job: JobFactory) -> None:
    job = ncclops_job(programs.greet, world_size=1, args=(Greeting("all"),)).start()
    with pytest.raises(HarnessError, match=r"1 notes 'left' of rank 0 will not come.*returned"):
        job.wait_for("left", rank=0)


def test_a_job_starts_once(ncclops_job: JobFactory) -> None:
    job = ncclops_job(programs.pass_places, world_size=1)
    with pytest.raises(HarnessError, match="not running"):
        job.wait()
    job.run()
    with pytest.raises(UsageError, match="started before"):
        job.run()


def test_a_parameter_that_wrapper_does_not_have_is_named(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    arguments = (tmp_path / "checkpoint", 1)
    job = ncclops_job(
        programs.train, world_size=1, args=arguments, wrapper={"soft_timout": BRIEFLY}
    )
    with pytest.raises(RankFailed, match="'soft_timout': …}: Wrapper has no such parameter"):
        job.run().value  # noqa: B018 - raises


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"world_size": 0}, "world_size=0: a job has 1 rank or more"),
        ({"deadline": 5}, "deadline=5: give a positive timedelta"),
        ({"gone_within": timedelta(0)}, "gone_within="),
        ({"env": {"DEPTH": 3}}, "env={'DEPTH': 3}: names and values are text"),
        ({"faults": ["kill"]}, "give a list of faults"),
        ({"args": (lambda: 0,)}, "args cannot be pickled"),
        ({"wrapper": {"on_incident": lambda: 0}}, "wrapper cannot be pickled"),
    ],
)
def test_what_is_no_job_is_refused_in_one_line(
    ncclops_job: JobFactory, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        ncclops_job(programs.greet, **{"world_size": 1, **given})
    assert "\n" not in str(caught.value)


def test_a_fault_that_does_not_strike_fails_the_test(ncclops_job: JobFactory) -> None:
    faults = [Fault.exception(0, "there"), Fault.exception(1, "here", 4)]
    job = ncclops_job(programs.pass_places, world_size=2, faults=faults)
    with pytest.raises(FaultDidNotStrike, match=r"at 'there', passing 1; .* at 'here', passing 4"):
        job.run()
    job = ncclops_job(programs.pass_places, world_size=2, faults=faults, all_strike=False)
    assert job.run().strikes == ()


def test_a_fault_is_not_missed_on_a_rank_that_another_took(ncclops_job: JobFactory) -> None:
    faults = [Fault.kill(1, "here", 1), Fault.exception(1, "here", 2)]
    result = ncclops_job(programs.pass_places, world_size=2, faults=faults).run()
    assert [strike.fault.n for strike in result.strikes] == [1]
    assert result.ranks[1].exit_code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ([Fault.kill(2, "step")], "ranks 0 to 1"),
        ([Fault.lost_host(0, "step", ranks=[4])], "ranks 0 to 1"),
        ([Fault.kill(1, "step"), Fault.hang(1, "step")], "another fault"),
    ],
)
def test_faults_that_do_not_fit_the_job_are_refused(
    ncclops_job: JobFactory, faults: list[Fault], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        ncclops_job(programs.greet, world_size=2, faults=faults)


# --- nothing is left --------------------------------------------------------------------------


def test_a_process_that_is_left_behind_fails_the_test_and_is_ended(ncclops_job: JobFactory) -> None:
    with ncclops_job(programs.leave_a_process_behind, world_size=1, gone_within=BRIEFLY) as job:
        with pytest.raises(LeftBehind, match="still there"):
            job.run()
        (left,) = job.processes()
    expect_gone(left)


def test_a_rank_that_is_signalled_from_outside(ncclops_job: JobFactory) -> None:
    job = ncclops_job(programs.stay, world_size=2).start()
    job.wait_for("there", count=2)
    job.signal(0, signal.SIGTERM)
    job.lose_host([1])
    assert {r.rank: r.exit_code for r in job.wait().ranks.values()} == {0: -15, 1: -9}


def test_ranks_and_their_children_end_when_pytest_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_stay.py").write_text(
        "from tests.testing import programs\n\n"
        "def test_it(ncclops_job):\n"
        "    job = ncclops_job(programs.stay_with_a_child, world_size=2).start()\n"
        "    pids = [pid for n in job.wait_for('there', count=2) for pid in n.fields['pids']]\n"
        "    print('pids', *pids, flush=True)\n"
        "    job.wait()\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), clean_environ()["PYTHONPATH"]])}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", "-p", "ncclops.testing.plugin", "test_stay.py"],
        cwd=tmp_path,
        env=clean_environ() | path,
        stdout=subprocess.PIPE,
        text=True,
    ) as session:
        assert session.stdout is not None
        said = ""
        while (match := re.search(r"pids (\d+) (\d+) (\d+) (\d+)\n", said)) is None:
            line = session.stdout.readline()
            assert line, said
            said += line
        session.kill()
    for pid in match.groups():
        expect_gone(int(pid))


def expect_gone(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(30)
    except psutil.NoSuchProcess:
        pass
