"""A job of several agents is seen whole from the first, and steered from any."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ncclops.control import client
from ncclops.status.model import RunStatus
from tests.conftest import LIMIT_S, CompletedText, free_port
from tests.lanes import GLOO, IN_SCRIPT, Lane, lanes
from tests.launch.conftest import Background, Run

pytestmark = pytest.mark.slow

TRAIN = (
    IN_SCRIPT
    + """
import time
import torch.distributed as dist
from ncclops import receipt
dist.init_process_group(**lane)
log = open(f"log-{os.environ['RANK']}", "w", buffering=1)
for n in range(10**9):
    log.write(f"{n} in\\n")
    dist.all_reduce(torch.ones(100, device=device))
    log.write(f"{n} out\\n")
    time.sleep(0.02)
    receipt.step(n)
"""
)


class Job:
    def __init__(self, directory: Path, agents: list[Background], nodes: int = 2) -> None:
        self.directory, self.agents = directory, agents
        self.runs = [Run(directory / f"node-{number}") for number in range(nodes)]

    def until(self, condition: Callable[[], Any]) -> Any:
        """What ``condition`` comes to; files and pages of another process announce nothing."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.1)
        pytest.fail(f"waited in vain: {self.status(0)}")

    def status(self, node: int) -> RunStatus | None:
        path = self.runs[node].path
        return client.status_of(path) if (path / "events.jsonl").exists() else None

    def trains(self) -> bool:
        """Whether the first node shows the step times of all four ranks."""
        status = self.status(0)
        ranks = () if status is None else status.ranks
        return len(ranks) == 4 and all(rank.step_s is not None for rank in ranks)


Start = Callable[..., Background]


def start_agents(
    start: Start, train: Path, port: int, *options: str, lane: Lane = GLOO, nproc: int = 2
) -> list[Background]:
    """Those of two nodes with ``nproc`` ranks each, which meet at ``port``."""
    profile = "multi-host-h200" if lane.needs_gpus else lane.profile
    return [
        start(
            *("launch", "--profile", profile, "--run-dir", f"node-{number}"),
            *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(nproc)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("--set", f"NCCL_HOSTID=node-{number}"),  # their ranks have the same GPUs
            *(*options, train),
        )
        for number in range(2)
    ]


@pytest.fixture
def job(
    background: Start, script: Callable[[str], Path], tmp_path: Path, lane: Lane
) -> Iterator[Job]:
    agents = start_agents(background, script(TRAIN), free_port(), lane=lane)
    job = Job(tmp_path, agents)
    job.until(job.trains)
    yield job
    for agent in agents:
        agent.terminate()


@lanes("nccl", extended=("gloo",))
def test_it_is_seen_whole_tightened_and_stopped_at_one_step(
    job: Job, ncclops: Callable[..., CompletedText]
) -> None:
    done = ncclops("status", "node-0", "--json")
    shown = json.loads(done.stdout)
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1, 2, 3]

    said = client.send(
        job.runs[0].path, {"action": "tighten-timeouts", "timeouts": {"soft": "45s"}}
    )
    assert "soft 45s" in str(said)
    for run in job.runs:  # both agents got the record, and both send it to their workers
        (change,) = job.until(partial(run.named, "control"))
        assert (change["action"], change["soft"], change["told"]) == (
            "tighten-timeouts",
            45.0,
            True,
        )

    done = ncclops("stop", "node-1", "--reason", "drain")
    assert done.returncode == 0, done.stderr
    assert [agent.wait(LIMIT_S) for agent in job.agents] == [0, 0]
    agreed = [run.named("stop-agreed")[0]["step"] for run in job.runs]
    assert agreed[0] == agreed[1]
    last = [(job.directory / f"log-{rank}").read_text().splitlines()[-1] for rank in range(4)]
    assert last == [f"{agreed[0]} out"] * 4
    assert [run.verdict["outcome"] for run in job.runs] == ["stopped", "stopped"]
    assert "drain" in job.runs[0].verdict["reason"]
    # What the first node knows of the others' ranks at the end is that they have ended.
    ended = json.loads(ncclops("status", "node-0", "--json").stdout)
    assert [rank["phase"] for rank in ended["ranks"]] == ["ended"] * 4


@pytest.mark.extended
def test_a_node_in_reserve_ends_with_the_others_and_is_asked_for_no_step(
    background: Callable[..., Background],
    script: Callable[[str], Path],
    tmp_path: Path,
    ncclops: Callable[..., CompletedText],
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    train = script(TRAIN)
    agents = [
        background(
            *("launch", "--profile", "local-cpu", "--run-dir", f"node-{number}"),
            *("--nnodes", "2:3", "--rdzv-endpoint", endpoint, "--nproc-per-node", "1"),
            *("--rdzv-conf", "last_call_timeout=10", train),
        )
        for number in range(3)
    ]
    job = Job(tmp_path, agents, nodes=3)
    job.until(lambda: sum(bool(run.named("step")) for run in job.runs if run.begun) == 2)
    assert ncclops("stop", "node-0").returncode == 0
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0, 0]
    agreed = [event["step"] for run in job.runs for event in run.named("stop-agreed")]
    assert agreed == [agreed[0]] * 2
    assert [run.verdict["outcome"] for run in job.runs] == ["stopped"] * 3


@pytest.mark.extended
def test_the_end_of_a_store_elsewhere_is_reported(
    background: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    """The workers have met in it, and can agree on nothing without it."""
    port = free_port()
    store = background("store", "serve", "--port", str(port))
    agents = start_agents(background, script(TRAIN), port, "--rdzv-conf", "is_host=false")
    job = Job(tmp_path, agents)
    job.until(job.trains)
    store.kill()
    assert [agent.wait(LIMIT_S) for agent in agents] == [1, 1]
    for node, run in enumerate(job.runs):
        said = run.stderr(2 * node)
        assert "ncclops: the store does not answer any more" in said
        assert "/ncclops/" not in said  # a traceback may be there, of the script's own line
        assert run.verdict["classification"]["class"] == "store-rendezvous"


# Rank 1 has nothing to do; rank 0 has steps until it is stopped.
UNEVEN = """
import os, time
from ncclops import receipt
if os.environ["RANK"] == "0":
    for n in range(10**9):
        time.sleep(0.02)
        receipt.step(n)
"""


def test_a_stop_asked_of_a_node_whose_ranks_have_ended_stops_the_job(
    background: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    """The ranks of the other node end well, at one step: that does not complete the job."""
    train = script(UNEVEN)
    agents = start_agents(background, train, free_port(), "--restart", "none", nproc=1)
    job = Job(tmp_path, agents)
    job.until(lambda: job.runs[1].begun and job.runs[1].named("worker-exited"))
    job.until(lambda: job.runs[0].begun and job.runs[0].named("step"))
    agents[1].terminate()
    assert [agent.wait(LIMIT_S) for agent in agents] == [128 + signal.SIGTERM] * 2
    assert [run.verdict["outcome"] for run in job.runs] == ["interrupted"] * 2


def test_a_node_in_reserve_without_workers_ends_with_the_job(
    background: Start, tmp_path: Path
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    agents = [
        background(
            *("launch", "--profile", "local-cpu", "--run-dir", f"node-{number}"),
            *("--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--nproc-per-node", "1"),
            *("--rdzv-conf", "last_call_timeout=20", "--restart", "none"),
            *("--no-python", "true"),
        )
        for number in range(2)
    ]
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0]
    runs = Job(tmp_path, agents).runs
    assert [run.verdict["outcome"] for run in runs] == ["completed"] * 2
    assert sorted(len(run.verdict["workers"]) for run in runs) == [0, 1]


# Node 0 serves the store through which rank 1 restarts without it.
LOSES_RANK_0 = """
import os, signal
import torch
import torch.distributed as dist
from ncclops import receipt
dist.init_process_group("gloo")
for n in range(20):
    if n == 5 and os.environ["RANK"] == "0" and dist.get_world_size() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(100))
    receipt.step(n)
dist.destroy_process_group()
"""


def test_a_node_whose_ranks_have_all_died_serves_the_store_for_the_others(
    background: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    agents = start_agents(
        background, script(LOSES_RANK_0), free_port(), "--restart", "in-process", nproc=1
    )
    job = Job(tmp_path, agents)
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0]
    for run in job.runs:
        assert run.verdict["outcome"] == "completed"
        assert run.reason.startswith("rank 0 was killed by SIGKILL, the others went on")


_CLONE_NEWUTS = 0x04000000

# Neither rank waits for the other one at the end.
FINITE = """
import os, time
import torch
import torch.distributed as dist
from ncclops import receipt
dist.init_process_group("gloo")
for n in range(100):
    dist.all_reduce(torch.ones(100))
    time.sleep(0.05)
    receipt.step(n)
dist.destroy_process_group()
"""


def _on_a_host_named(name: str) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)


def _lose_the_host_of_the_job_store(
    start: Start, train: Path, directory: Path, *, ranks_store: str, restart: str
) -> tuple[int, Run]:
    """Exit code and run of the other node, of two with a rank each.

    ``ranks_store`` is the node that serves the store of the ranks, "lost" or "left".
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, for two names of this host")
    endpoint = f"127.0.0.1:{free_port()}"
    agents = {
        node: start(
            *("launch", "--profile", "local-cpu", "--run-dir", node, "--nproc-per-node", "1"),
            *("--nnodes", "2", "--rdzv-endpoint", endpoint, "--restart", restart),
            *("--rdzv-conf", f"is_host={node == 'lost'}", train),
            # The first name has the first rank, and serves the store of all.
            preexec_fn=partial(_on_a_host_named, "a" if node == ranks_store else "b"),
        )
        for node in ("lost", "left")
    }
    runs = {node: Run(directory / node) for node in agents}
    job = Job(directory, [*agents.values()])
    job.until(lambda: all(run.begun and run.named("step") for run in runs.values()))
    told = re.search(r"agent (\d+) of node", (runs["lost"].path / "agent.log").read_text())
    assert told is not None
    os.kill(agents["lost"].pid, signal.SIGSTOP)  # it would tell the others that its agent died
    os.kill(int(told[1]), signal.SIGKILL)
    agents["lost"].kill()
    return agents["left"].wait(LIMIT_S), runs["left"]


def test_a_node_that_serves_the_ranks_store_ends_when_it_hears_of_no_other_one(
    background: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    code, run = _lose_the_host_of_the_job_store(
        background, script(FINITE), tmp_path, ranks_store="left", restart="in-process"
    )
    assert (code, run.verdict["outcome"], run.verdict["ranks_lost"]) == (0, "completed", [1])


def test_no_process_takes_the_place_of_a_rank_whose_store_is_gone(
    background: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    code, run = _lose_the_host_of_the_job_store(
        background, script(FINITE), tmp_path, ranks_store="lost", restart="in-process:grow"
    )
    assert (code, run.verdict["classification"]["class"]) == (1, "store-rendezvous")
    assert len(run.named("worker-started")) == 1
