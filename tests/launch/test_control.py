"""The control plane of a real `ncclops launch`."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from ncclops.control import client
from ncclops.errors import NcclopsError
from ncclops.record.paths import RunPaths
from ncclops.status.model import RunStatus
from tests.conftest import LIMIT_S, CompletedText
from tests.launch.conftest import Background, Run

Launch = Callable[..., Background]
Ncclops = Callable[..., CompletedText]

TRAIN = """
import time
import torch
import torch.distributed as dist
from ncclops import receipt

dist.init_process_group("gloo")
step = 0
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
    receipt.step(step)
    step += 1
"""


class Live:
    """A run under way in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def until(self, condition: Callable[[RunStatus], object]) -> RunStatus:
        """The first status of which ``condition`` holds. No event announces a status."""
        deadline = time.monotonic() + LIMIT_S
        status: RunStatus | None = None
        while time.monotonic() < deadline:
            if (self.path / "events.jsonl").exists():
                status = client.status_of(self.path)
                if condition(status):
                    return status
            time.sleep(0.1)
        pytest.fail(f"waited in vain; the last status: {status}")

    def metrics(self) -> str:
        with closing(client._Connection(self.path)) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

    def servers(self) -> list[psutil.Process]:
        """The processes of the control plane of this run."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "ncclops.control.server" in line and str(self.path) in line:
                found.append(process)
        return found


@pytest.mark.slow
def test_a_run_is_seen_and_steered(
    background: Launch,
    tmp_path: Path,
    script: Callable[[str], Path],
    ncclops: Ncclops,
) -> None:
    """One run, from its start to its stop: a launch with torch takes seconds."""
    live = Live(tmp_path / "runs" / "run")
    job = background("launch", "--run-dir", live.path, "--nproc-per-node", "2", script(TRAIN))

    seen = live.until(lambda s: s.step is not None and s.step > 20 and s.median_step_s)
    assert (seen.phase, seen.source, seen.world_size) == ("training", "agent", 2)
    for rank in seen.ranks:
        assert rank.host == socket.gethostname()
        assert rank.phase == "training"
        assert rank.step_s is not None
        assert rank.step_s >= 0.01
        assert rank.memory_gib
    assert seen.goodput is not None
    assert seen.goodput["ratio"] > 0
    metrics = live.metrics()
    assert 'ncclops_rank_step_seconds{host="' in metrics
    assert 'ncclops_run_phase{phase="training"} 1.0' in metrics

    (server,) = live.servers()
    server.kill()
    assert client.send(live.path, {"action": "restart", "reason": "a trial", "by": "a test"})
    seen = live.until(lambda s: s.restarts == 1 and s.phase == "training" and s.iteration == 1)
    assert seen.last_fault is not None
    assert "a trial" in seen.last_fault.cause
    assert 'ncclops_restarts_total{mode="in-process"} 1.0' in live.metrics()

    tighten = {"action": "tighten-timeouts", "timeouts": {"process_group": "100s"}}
    said = client.send(live.path, tighten)
    assert said == "from the next step on: soft 80s, hard 90s, process_group 100s"
    with pytest.raises(NcclopsError, match="process_group is 100s already"):
        client.send(live.path, {**tighten, "timeouts": {"process_group": "200s"}})
    run = Run(live.path)

    def changed() -> set[int]:
        changes = run.named("group-timeout")
        return {change["rank"] for change in changes if change["to_s"] == 100.0}

    live.until(lambda _: changed() == {0, 1})

    assert ncclops("stop", "--reason", "seen enough").returncode == 0
    assert job.wait(LIMIT_S) == 0
    assert (run.verdict["outcome"], run.verdict["exit_code"]) == ("stopped", 0)
    assert "seen enough" in run.verdict["reason"]
    assert run.verdict["goodput"]["seconds"]["restart"] > 0
    assert [(e["action"], e["by"]) for e in run.named("control")][:2] == [
        ("restart", "a test"),
        ("tighten-timeouts", "unknown"),
    ]
    seen = client.status_of(live.path)
    assert (seen.phase, seen.outcome, seen.source) == ("ended", "stopped", "directory")
    assert seen.step is not None
    assert live.servers() == []
    assert not RunPaths(live.path).socket.exists()
    assert not RunPaths(live.path).token.exists()


PRINTS_STEPS = """
import itertools, time
for step in itertools.count():
    print(f"step {step:05d} loss {9 / (step + 1):.4f} tok/s 1,000", flush=True)
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_the_steps_of_a_script_that_only_prints_are_seen(
    background: Launch,
    script: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    live = Live(tmp_path / "run")
    options = ("--run-dir", live.path, "--nproc-per-node", "2", "--restart", "none")
    job = background("launch", *options, script(PRINTS_STEPS))
    seen = live.until(lambda s: s.step is not None and s.step >= 24)
    assert seen.phase == "training"
    assert [rank.phase for rank in seen.ranks] == ["training", "training"]
    client.send(live.path, {"action": "stop"})
    job.wait(LIMIT_S)
    assert client.status_of(live.path).outcome == "stopped"


@pytest.fixture
def sleeping(
    background: Launch,
    quick_profile: Path,
    tmp_path: Path,
) -> tuple[Live, Background, str]:
    """A run of a program that is not Python, with its control plane on TCP too."""
    live = Live(tmp_path / "runs" / "run")
    read, write = os.pipe()
    command = ["launch", "--profile", quick_profile, "--run-dir", live.path]
    command += ["--control-listen", "0", "--no-python", "sleep", "600"]
    job = background(*command, stderr=write)
    os.close(write)
    with os.fdopen(read) as shown:
        url = next(line.split()[-1] for line in shown if "status and metrics at" in line)
        live.until(lambda s: s.source == "agent" and s.ranks)
    return live, job, url


def test_any_program_can_be_seen_and_stopped(
    sleeping: tuple[Live, Background, str], ncclops: Ncclops
) -> None:
    live, job, url = sleeping
    with urllib.request.urlopen(f"{url}/status", timeout=LIMIT_S) as response:
        assert json.load(response)["run_dir"] == str(live.path)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}/control", b'{"action": "stop"}', timeout=LIMIT_S)
    with pytest.raises(NcclopsError, match="does not restart in place"):
        client.send(live.path, {"action": "restart"})
    assert "SIGKILL after 9s" in ncclops("stop", live.path, "--grace", "9s").stderr
    job.wait(LIMIT_S)
    assert client.status_of(live.path).outcome == "stopped"


def test_a_run_whose_directory_is_moved_goes_on_where_it_is_now(
    sleeping: tuple[Live, Background, str], ncclops: Ncclops, tmp_path: Path
) -> None:
    live, job, _ = sleeping
    parent = (tmp_path / "runs").rename(tmp_path / "elsewhere")
    moved = Live((parent / "run").rename(parent / "moved"))
    deadline = time.monotonic() + LIMIT_S
    while not (live.path.exists() and live.path.samefile(moved.path)):
        assert time.monotonic() < deadline, "nothing leads from the old path to the new one"
        time.sleep(0.02)  # no event: another process's link
    moved.until(lambda s: s.source == "agent")
    assert ncclops("stop", moved.path, "--grace", "9s").returncode == 0
    job.wait(LIMIT_S)
    assert Run(moved.path).verdict["outcome"] == "stopped"
    assert client.status_of(moved.path).outcome == "stopped"


def test_with_an_agent_that_is_killed_its_server_goes(
    sleeping: tuple[Live, Background, str],
) -> None:
    live, job, _ = sleeping
    (server,) = live.servers()
    (agent,) = [child for child in psutil.Process(job.pid).children() if child == server.parent()]
    agent.kill()
    job.wait(LIMIT_S)
    psutil.wait_procs([server], LIMIT_S)
    assert live.servers() == []
    status = client.status_of(live.path)
    assert (status.phase, status.outcome) == ("ended", "failed")


def test_an_address_that_cannot_be_had_is_refused_before_the_start(
    ncclops: Ncclops, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for text, says in ((port, "give another port"), ("nowhere", "no address")):
            done = ncclops("launch", "--control-listen", text, "--no-python", "true")
            assert done.returncode == 2
            assert says in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_socket_cannot_be_made_goes_on_without(
    ncclops: Ncclops, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "control").write_text("in the way")
    done = ncclops("launch", "--run-dir", tmp_path / "run", "--no-python", "true")
    assert done.returncode == 0
    assert "`ncclops stop` will not reach this run: " in done.stderr
