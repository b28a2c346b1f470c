"""However a run is ended, nothing of it stays alive and nothing that was written is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ncclops.agent.supervisor import SAME_REQUEST_S
from tests.conftest import LIMIT_S
from tests.launch.conftest import Background, Run

Script = Callable[..., Path]
Processes = Callable[[], list[psutil.Process]]

# Writes a thousand numbered lines at a time without ever stopping (were it faster, the test would
# wait for the agent to read hundreds of thousands of them), and has children of every kind that is
# hard to find: a plain one, one in a session of its own, and one whose parent has left.
BUSY = """
import itertools, os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "301"], start_new_session=True)
subprocess.run(["sh", "-c", "setsid sleep 302 & exit 0"])
STUBBORN
open(f"ready-{os.environ['RANK']}", "w").close()
for n in itertools.count():
    sys.stdout.write(f"line {n} {'x' * 200}\\n")
    if n % 1000 == 0:
        # What has been written so far, recorded outside the log; the log may hold more, never less.
        with open(f"written-{os.environ['RANK']}.partial", "w") as file:
            file.write(str(n))
        os.replace(file.name, f"written-{os.environ['RANK']}")
        time.sleep(0.05)
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
PROCESSES_OF_A_WORKER = 4  # itself and three sleeps


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll ``condition``; files of another process's making have no event to wait for."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


@pytest.fixture
def waiting_worker(
    background: Callable[..., Background], script: Script, tmp_path: Path
) -> Callable[..., Background]:
    """Starts one worker that runs some lines and then waits for signals; returns when it waits."""

    def start(lines: str, *options: str | Path) -> Background:
        path = script(
            f"import signal, sys\n{lines}open('ready', 'w').close()\n"
            "while True:\n    signal.pause()\n"
        )
        launched = background("launch", *options, "--nproc-per-node", "1", "--run-dir", "run", path)
        wait_until((tmp_path / "ready").exists, "ready")
        return launched

    return start


@pytest.fixture
def busy_run(
    background: Callable[..., Background],
    script: Script,
    quick_profile: Path,
    tmp_path: Path,
    of_this_test: Processes,
) -> Callable[..., Background]:
    """Starts two busy workers and returns once they and all their children are there."""

    def start(*, stubborn: bool = False, restart: str = "in-process") -> Background:
        path = script(BUSY.replace("STUBBORN", STUBBORN if stubborn else ""))
        options = ["--profile", quick_profile, "--restart", restart, "--nproc-per-node", "2"]
        agent = background("launch", *options, "--run-dir", "run", path)
        wait_until(
            lambda: all((tmp_path / f"written-{rank}").exists() for rank in (0, 1)),
            "both workers at work",
        )
        assert len(of_this_test()) >= 2 * PROCESSES_OF_A_WORKER
        return agent

    return start


def assert_nothing_lost(tmp_path: Path) -> None:
    for rank in (0, 1):
        *complete, _ = Run(tmp_path / "run").stdout(rank).split("\n")
        numbers = [int(line.split()[1]) for line in complete]
        assert numbers == list(range(len(numbers))), "lines lost or mixed"
        assert len(numbers) > int((tmp_path / f"written-{rank}").read_text())


def assert_all_gone(of_this_test: Processes) -> None:
    wait_until(lambda: not of_this_test(), f"all gone; left: {of_this_test()}")


# What a worker is made of does not depend on which signal it was: one of them is enough for each.
@pytest.mark.parametrize(
    ("signum", "code", "restart", "stubborn"),
    [
        (signal.SIGINT, 130, "process", False),
        (signal.SIGTERM, 143, "in-process", True),
        (signal.SIGHUP, 129, "none", False),
    ],
)
def test_a_signal_ends_everything_and_leaves_a_verdict(
    signum: signal.Signals,
    code: int,
    restart: str,
    stubborn: bool,
    busy_run: Callable[..., Background],
    of_this_test: Processes,
    tmp_path: Path,
) -> None:
    """Workers that ignore SIGTERM, and children that hide, end too; the verdict is written."""
    agent = busy_run(stubborn=stubborn, restart=restart)
    agent.send_signal(signum)
    assert agent.wait(LIMIT_S) == code
    assert of_this_test() == [], "gone by the time that the launcher returns"
    assert_nothing_lost(tmp_path)
    run = Run(tmp_path / "run")
    assert run.verdict["outcome"] == "interrupted"
    expected = "SIGKILL" if stubborn else "SIGTERM"
    assert [worker["signal"] for worker in run.verdict["workers"]] == [expected] * 2
    assert run.named("stop-requested")[0]["signal"] == signum.name


@pytest.mark.parametrize("stubborn", [pytest.param(False, marks=pytest.mark.extended), True])
def test_sigkill_of_the_launcher_leaves_no_process(
    stubborn: bool, busy_run: Callable[..., Background], of_this_test: Processes, tmp_path: Path
) -> None:
    launcher = busy_run(stubborn=stubborn)
    launcher.kill()
    assert_all_gone(of_this_test)
    assert_nothing_lost(tmp_path)
    verdict = Run(tmp_path / "run").verdict
    assert verdict["outcome"] == "failed"
    assert "launcher was killed" in verdict["reason"]


def test_sigkill_of_the_agent_leaves_no_process(
    busy_run: Callable[..., Background], of_this_test: Processes, tmp_path: Path
) -> None:
    """Not the process the user sees, but its child, which supervises."""
    launcher = busy_run(stubborn=True)
    (agent,) = psutil.Process(launcher.pid).children()
    agent.kill()
    assert launcher.wait(LIMIT_S) == 1
    assert of_this_test() == []
    assert_nothing_lost(tmp_path)
    verdict = Run(tmp_path / "run").verdict
    why = "the agent could not go on: it was killed by SIGKILL"
    assert (verdict["outcome"], verdict["reason"]) == ("failed", why)
    assert verdict["attempts"] == 1


@pytest.mark.extended
def test_sigkill_of_both_at_once_leaves_no_worker(
    busy_run: Callable[..., Background], of_this_test: Processes, tmp_path: Path
) -> None:
    """As `pkill -9 -f ncclops` does; the workers' own children are not ended then."""
    launcher = busy_run(stubborn=True)
    (agent,) = psutil.Process(launcher.pid).children()
    os.kill(launcher.pid, signal.SIGSTOP)  # so that it cannot clean up in between
    agent.kill()
    launcher.kill()
    launcher.wait(LIMIT_S)
    wait_until(lambda: {p.name() for p in of_this_test()} <= {"sleep"}, "all workers gone")
    assert_nothing_lost(tmp_path)


def test_a_second_interrupt_does_not_wait_for_the_grace_time(
    waiting_worker: Callable[..., Background], tmp_path: Path
) -> None:
    profile = tmp_path / "patient.toml"
    profile.write_text(
        'description = "Long grace."\nkind = "lane"\nnodes = "any"\nextends = "local-cpu"\n'
        f'[timeouts]\nstop_grace = "{LIMIT_S * 10}s"\n'
    )
    options = ["--profile", profile, "--restart", "process"]
    agent = waiting_worker("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n", *options)
    agent.send_signal(signal.SIGINT)
    wait_until(lambda: bool(Run(tmp_path / "run").named("stop-requested")), "the first was taken")
    time.sleep(2 * SAME_REQUEST_S)
    agent.send_signal(signal.SIGINT)
    assert agent.wait(LIMIT_S) == 130


def test_a_worker_that_ends_by_the_sigterm_of_a_stop_has_ended_cleanly(
    waiting_worker: Callable[..., Background], tmp_path: Path
) -> None:
    """As in the imports of a script: there is nothing yet that could be cut."""
    agent = waiting_worker("", "--restart", "none")
    agent.send_signal(signal.SIGINT)
    assert agent.wait(LIMIT_S) == 130
    run = Run(tmp_path / "run")
    assert run.verdict["workers"][0]["signal"] == "SIGTERM"
    assert run.verdict["reason"] == "stopped by SIGINT"


@pytest.mark.extended
def test_a_worker_may_end_well_when_asked_to_stop(
    waiting_worker: Callable[..., Background], tmp_path: Path
) -> None:
    """A script that saves on SIGTERM and exits 0 gets the time for it; the run is interrupted."""
    agent = waiting_worker(
        "def save(*_):\n    print('saved'); sys.exit(0)\nsignal.signal(signal.SIGTERM, save)\n"
    )
    agent.terminate()
    assert agent.wait(LIMIT_S) == 143
    run = Run(tmp_path / "run")
    assert run.stdout(0) == "saved\n"
    assert run.verdict["workers"][0]["exit_code"] == 0


@pytest.mark.slow
def test_a_signal_to_all_processes_of_a_job_leaves_the_grace_time(
    waiting_worker: Callable[..., Background], tmp_path: Path
) -> None:
    """systemd and batch systems signal each process, the supervisor and its agent as well."""
    agent = waiting_worker(
        "import time\n"
        "def save(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(2); print('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
    )
    (held,) = psutil.Process(agent.pid).children()
    os.kill(held.pid, signal.SIGTERM)
    wait_until(lambda: bool(Run(tmp_path / "run").named("stop-requested")), "the first was taken")
    agent.terminate()
    for worker in held.children():
        with suppress(psutil.NoSuchProcess):
            worker.terminate()
    assert agent.wait(LIMIT_S) == 143
    run = Run(tmp_path / "run")
    assert run.stdout(0) == "saved\n"
    assert run.verdict["workers"][0]["exit_code"] == 0
    assert len(run.named("stop-requested")) == 1


def test_user_signals_are_passed_on(waiting_worker: Callable[..., Background]) -> None:
    """Schedulers announce the end of an allocation with them."""
    agent = waiting_worker("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n")
    agent.send_signal(signal.SIGUSR1)
    assert agent.wait(LIMIT_S) == 0


def test_children_that_outlive_their_worker_end_with_the_run(
    background: Callable[..., Background], script: Script, of_this_test: Processes
) -> None:
    path = script("import subprocess; subprocess.Popen(['setsid', 'sleep', '300'])")
    agent = background("launch", "--restart", "process", "--nproc-per-node", "1", path)
    assert agent.wait(LIMIT_S) == 0
    assert of_this_test() == []


def test_a_script_that_goes_on_in_the_background_is_ended_and_that_is_said(
    background: Callable[..., Background],
    script: Script,
    tmp_path: Path,
    of_this_test: Processes,
) -> None:
    path = script("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)")
    with (tmp_path / "shown").open("w") as shown:
        agent = background(
            "launch", "--restart", "process", "--nproc-per-node", "2", path, stderr=shown
        )
        assert agent.wait(LIMIT_S) == 0
    assert of_this_test() == []
    told = "warning: 2 processes that workers have forked still run, and are ended"
    assert told in (tmp_path / "shown").read_text()


def test_what_a_shell_had_started_before_it_became_the_launcher_is_left_alone(
    background: Callable[..., Background],
    script: Script,
    tmp_path: Path,
    of_this_test: Processes,
) -> None:
    """``helper & exec ncclops launch …``; also what a helper leaves to the launcher meanwhile."""
    environ = os.environ | {"TEST_MARK": f"test-{os.getpid()}-{tmp_path.name}"}
    leaves = "sleep 300 & while [ ! -e began ]; do sleep 0.05; done; touch left"

    def helpers() -> None:
        for command in (["sh", "-c", leaves], ["sleep", "301"]):
            subprocess.Popen(command, cwd=tmp_path, env=environ)

    path = script(
        "import os, subprocess, time\n"
        "subprocess.Popen(['setsid', 'sleep', '302'])\n"
        "open('began', 'w').close()\n"
        "while not os.path.exists('left'): time.sleep(0.05)\n"
    )
    options = ["--restart", "process", "--nproc-per-node", "1"]
    agent = background("launch", *options, path, preexec_fn=helpers)
    assert agent.wait(LIMIT_S) == 0
    commands = sorted(process.cmdline() for process in of_this_test())
    assert commands == [["sleep", "300"], ["sleep", "301"]]


def test_losing_the_store_is_reported_and_ends_no_worker(
    background: Callable[..., Background], script: Script, tmp_path: Path
) -> None:
    """Groups that are up go on without it. (Only the in-process restart cannot.) Of a failure that
    comes after it the verdict names the store."""
    path = script(
        "import os, time\n"
        "open('ready', 'w').close()\n"
        "while not os.path.exists('go'):\n"
        "    time.sleep(0.05)\n"
        "raise SystemExit('the script went on')\n"
    )
    options = ["--restart", "process", "--nproc-per-node", "1", "--run-dir", "run"]
    agent = background("launch", *options, path)
    wait_until((tmp_path / "ready").exists, "ready")
    (store,) = _stores(agent.pid)
    store.kill()
    run = Run(tmp_path / "run")
    wait_until(lambda: bool(run.named("fault")), "the loss was reported")
    (tmp_path / "go").touch()
    assert agent.wait(LIMIT_S) == 1
    lost = run.named("fault")[0]
    assert (lost["cause"], lost["why"]) == ("store-lost", "was killed by SIGKILL")
    assert "the script went on" in run.stderr(0)
    store_first = "the store server was killed by SIGKILL; rank 0"
    assert run.verdict["reason"] == f"{store_first} exited with code 1"
    assert run.verdict["story"]["what"].startswith(store_first)


def test_a_store_that_is_lost_before_the_ranks_have_come_to_it_ends_the_run_at_once(
    background: Callable[..., Background], script: Script, tmp_path: Path
) -> None:
    """The restart core would try to reach it for minutes."""
    options = ["--restart", "in-process", "--no-warm-start", "--nproc-per-node", "1"]
    agent = background("launch", *options, "--run-dir", "run", script(""))
    wait_until(lambda: bool(_stores(agent.pid)), "the store server runs")
    _stores(agent.pid)[0].kill()
    assert agent.wait(LIMIT_S) == 1
    how = "cannot start attempt 1: its store server was killed by SIGKILL"
    assert Run(tmp_path / "run").verdict["reason"] == how


def _stores(launcher: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error):
            own = "ncclops.agent.store_server" in process.cmdline()
            if own or process.name() == "ncclops-store":  # started afresh, or forked
                found.append(process)
    return found
