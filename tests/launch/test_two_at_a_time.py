"""Two launches want the same: the second says who has it, and the first goes on undisturbed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.conftest import LIMIT_S, CompletedText, free_port
from tests.launch.conftest import Background, Run
from tests.launch.test_kill import wait_until

Start = Callable[..., Background]
WORK = ("--no-python", "sh", "-c", "touch ready; until [ -e go ]; do sleep 0.05; done")


def test_the_second_says_who_has_port_and_run_directory(
    background: Start, ncclops: Callable[..., CompletedText], tmp_path: Path
) -> None:
    port, other = str(free_port()), str(free_port())
    options = ("launch", "--nproc-per-node", "1", "--profile", "local-cpu")
    first = background(
        *(*options, "--master-port", port, "--control-listen", other, "--run-dir", "run", *WORK)
    )
    wait_until((tmp_path / "ready").exists, "ready")
    before = (tmp_path / "run/run.json").read_bytes()
    named = f"the run in {tmp_path / 'run'}, launched as process {first.pid} at 2"
    for option in ("--master-port", "--control-listen"):
        wanted = port if option == "--master-port" else other
        done = ncclops(*options, option, wanted, "--run-dir", "second", *WORK)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"Address already in use by {named}" in done.stderr
        assert not (tmp_path / "second").exists()
    done = ncclops(*options, "--run-dir", "run", *WORK)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"was launched as process {first.pid} at 2" in done.stderr
    assert "and is under way: give --run-dir another path" in done.stderr

    (tmp_path / "go").touch()
    assert first.wait(LIMIT_S) == 0
    run = Run(tmp_path / "run")
    assert (tmp_path / "run/run.json").read_bytes() == before
    assert len(run.named("run-started")) == len(run.named("worker-started")) == 1
    done = ncclops(*options, "--run-dir", "run", *WORK)
    assert done.returncode == 2 and "which has ended (completed)" in done.stderr


def test_a_directory_whose_processes_were_killed_is_not_in_use(
    background: Start, ncclops: Callable[..., CompletedText], tmp_path: Path
) -> None:
    options = ("launch", "--nproc-per-node", "1", "--profile", "local-cpu", "--run-dir", "run")
    first = background(*options, *WORK)
    wait_until((tmp_path / "ready").exists, "ready")
    (agent,) = psutil.Process(first.pid).children()
    first.send_signal(signal.SIGSTOP)  # it would write a verdict for the agent
    agent.kill()
    first.kill()
    first.wait(LIMIT_S)
    done = ncclops(*options, *WORK)
    assert done.returncode == 2
    assert f"process {first.pid} at 2" in done.stderr and "which left no verdict" in done.stderr
