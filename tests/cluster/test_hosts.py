"""Jobs over several hosts, with the network between them cut, agents killed, and spares."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.hosts import Background, Hosts, hosts, why_not
from tests.conftest import LIMIT_S

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.slow,
]

TRAIN = Path(__file__).parent / "train.py"
STEPS = 60
# Fast enough for a test, and slower than a scheduling hiccup of a busy machine.
CONF = "keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=4,join_timeout=90"
PROFILE = """
description = "For tests: what is lost is noticed soon."
kind = "lane"
nodes = "any"
extends = "base"
[timeouts]
stop_grace = "2s"
process_group = "40s"
heartbeat = "6s"
"""


class Job:
    """The agents of one job, and the store that none of them hosts."""

    def __init__(self, made: Hosts, directory: Path) -> None:
        self.hosts, self.directory = made, directory
        self.agents: dict[str, Background] = {}
        (directory / "profile.toml").write_text(PROFILE)
        self.store = f"{made.address('hub')}:29400"

    def serve_store(self) -> None:
        self.hosts.start("hub", "store", "serve", "--all-interfaces", "--port", "29400")

    def launch(self, host: str, *options: str | Path, env: dict[str, str] | None = None) -> None:
        self.agents[host] = self.hosts.start(
            host,
            *("launch", "--profile", self.directory / "profile.toml"),
            *("--run-dir", self.directory / host, "--rdzv-conf", CONF),
            *options,
            env=env,
        )

    def train(self, host: str, nnodes: str, nproc: int, *, pause: float) -> None:
        self.launch(
            host,
            *("--nnodes", nnodes, "--rdzv-endpoint", self.store),
            *("--nproc-per-node", str(nproc)),
            *(TRAIN, str(self.directory), str(STEPS), str(pause)),
        )

    def exit_code(self, host: str) -> int:
        code = self.agents[host].wait(LIMIT_S)
        print(self.hosts.output(host))
        return code

    def verdict(self, host: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.directory / host / "verdict.json").read_text())
        return document

    def trained(self) -> tuple[int, float]:
        """The step of the last checkpoint, and the weight in it."""
        try:
            step, weight = (self.directory / "checkpoint").read_text().split()
        except FileNotFoundError:
            return 0, 0.0
        return int(step), float(weight)

    def agent_pid(self, host: str) -> int:
        """The agent under the launcher that holds the run, which nothing on the host started."""
        found = self.hosts.pids(host)  # by number, which says nothing of what started first
        (launcher,) = [p for p in map(psutil.Process, found) if p.ppid() not in found]
        (agent,) = launcher.children()
        return agent.pid


def until(condition: Callable[[], object], job: Job) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            for host in job.agents:
                print(job.hosts.output(host))
            pytest.fail("what the test waits for did not happen")
        time.sleep(0.1)


def right_weight() -> float:
    """What one process computes."""
    weight = 0.0
    for step in range(STEPS):
        weight -= 0.1 * sum(weight - (step * 7 + sample) % 11 for sample in range(24)) / 24
    return weight


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    count: int = request.param
    with hosts(count, tmp_path) as made:
        yield Job(made, tmp_path)


@pytest.mark.parametrize("job", [4], indirect=True)
@pytest.mark.extended
def test_a_job_on_four_hosts_goes_on_without_the_host_of_rank_0(job: Job) -> None:
    """Its link is cut, as by a pulled cable, at a moment that chance picks."""
    seed = int.from_bytes(os.urandom(2))
    moment = random.Random(seed).randint(15, 30)
    print(f"seed {seed}: cut after step {moment}")
    job.serve_store()
    for number in range(4):
        job.train(f"h{number}", "4", 2, pause=0.1)
    until(lambda: job.trained()[0] >= moment, job)
    assert "on 8 ranks" in job.hosts.output("h0")
    job.hosts.cut("h0")
    for host in ("h1", "h2", "h3"):
        assert job.exit_code(host) == 0
        assert "h0 was lost" in job.verdict(host)["reason"]
    assert "on 6 ranks" in job.hosts.output("h1")
    step, weight = job.trained()
    assert step == STEPS
    assert weight == pytest.approx(right_weight(), rel=1e-9)
    # The host that was cut off ends by its own timeouts, and says why.
    assert job.exit_code("h0") == 1
    assert "store" in job.hosts.output("h0")


@pytest.mark.parametrize("job", [3], indirect=True)
def test_a_spare_takes_the_place_of_a_lost_host(job: Job) -> None:
    job.serve_store()
    for number in range(3):
        job.train(f"h{number}", "2:3", 1, pause=0.1)
    until(lambda: job.trained()[0] >= 15, job)
    assert "in reserve: h2" in job.hosts.output("h0")
    job.hosts.cut("h0")
    assert [job.exit_code(host) for host in ("h1", "h2")] == [0, 0]
    steps, weight = job.trained()
    assert steps == STEPS
    assert weight == pytest.approx(right_weight(), rel=1e-9)
    assert "on 2 ranks" in job.hosts.output("h1")  # not fewer than before
    assert "rank 1 of 2: done" in job.hosts.output("h2")


@pytest.mark.extended
@pytest.mark.parametrize("job", [2], indirect=True)
def test_an_agent_may_start_later_than_a_host_may_be_silent(job: Job) -> None:
    """The first one is the host of the store, and says for whom it waits."""
    endpoint = f"{job.hosts.address('h0')}:29400"
    options = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--nproc-per-node", "1")
    worker = ("--no-python", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE at $MASTER_ADDR"')
    job.launch("h0", *options, *worker)
    until(lambda: "1/2 nodes: h0; waiting for 1" in job.hosts.output("h0"), job)
    time.sleep(10)  # CONF: a host that is silent for 8 s is lost
    job.launch("h1", *options, *worker)
    assert [job.exit_code(host) for host in ("h0", "h1")] == [0, 0]
    assert f"rank 1 of 2 at {job.hosts.address('h0')}" in job.hosts.output("h1")


@pytest.mark.parametrize("job", [3], indirect=True)
@pytest.mark.extended
def test_a_killed_agent_takes_its_workers_along_and_a_spare_starts_in_its_place(job: Job) -> None:
    """Without restarts in place: a new round, new processes, one history of attempts."""
    job.serve_store()
    script = job.directory / "work.sh"
    script.write_text(
        'echo "try $TORCHELASTIC_RESTART_COUNT rank $RANK of $WORLD_SIZE"\n'
        '[ "$TORCHELASTIC_RESTART_COUNT" = 0 ] && exec sleep 600\nexit 0\n'
    )
    for number in range(3):
        job.launch(
            f"h{number}",
            *("--nnodes", "2:3", "--rdzv-endpoint", job.store, "--nproc-per-node", "2"),
            *("--restart", "process", "--no-python", "sh", script),
        )
    until(lambda: "try 0 rank 2 of 4" in job.hosts.output("h1"), job)
    os.kill(job.agent_pid("h0"), signal.SIGKILL)
    assert job.exit_code("h0") == 1
    assert not job.hosts.pids("h0")
    assert [job.exit_code(host) for host in ("h1", "h2")] == [0, 0]
    # On a machine so busy that it takes seconds to say why, the silence is noticed first.
    why = r"h0 is lost: (its agent was killed|no heartbeat for 8s)"
    assert re.search(why, job.hosts.output("h1"))
    assert "try 1 rank 2 of 4" in job.hosts.output("h2")
    assert job.verdict("h1")["attempts"] == 2


@pytest.mark.extended
@pytest.mark.parametrize("job", [3], indirect=True)
def test_a_spare_starts_in_the_place_of_a_host_with_a_broken_gpu(job: Job) -> None:
    """Without restarts in place. There is no NVML here: the rank's output is all that is known."""
    job.serve_store()
    script = job.directory / "work.sh"
    script.write_text(
        'echo "try $TORCHELASTIC_RESTART_COUNT rank $RANK of $WORLD_SIZE"\n'
        '[ "$TORCHELASTIC_RESTART_COUNT" = 0 ] || exit 0\n'
        '[ "$RANK" = 3 ] || exec sleep 600\n'
        'echo "RuntimeError: CUDA error: uncorrectable ECC error encountered" >&2\nexit 1\n'
    )
    for number in range(3):
        job.launch(
            f"h{number}",
            *("--nnodes", "2:3", "--rdzv-endpoint", job.store, "--nproc-per-node", "2"),
            *("--restart", "process", "--no-python", "sh", script),
            env={"CUDA_VISIBLE_DEVICES": "4,6"},
        )
    fault = "GPU 6 on node h1: uncorrectable ECC error encountered; replace node h1"
    assert job.exit_code("h1") == 1
    assert job.verdict("h1")["attempts"] == 1
    assert job.verdict("h1")["reason"].endswith(fault)
    assert job.hosts.output("h1").rstrip().endswith(fault)
    assert [job.exit_code(host) for host in ("h0", "h2")] == [0, 0]
    for host in ("h0", "h2"):
        assert f"the job can run on another node; {fault}" in job.hosts.output(host)
        assert job.verdict(host)["attempts"] == 2
    assert "try 1 rank 0 of 4" in job.hosts.output("h0")
    assert "try 1 rank 2 of 4" in job.hosts.output("h2")


@pytest.mark.parametrize("job", [2], indirect=True)
@pytest.mark.extended
def test_a_failure_on_one_host_is_shown_on_the_other_and_retries_count_once(job: Job) -> None:
    endpoint = f"{job.hosts.address('h0')}:29500"
    script = job.directory / "work.sh"
    script.write_text(
        '[ "$RANK" = 1 ] || exec sleep 600\necho "no luck, says rank 1" >&2\nexit 7\n'
    )
    for number in range(2):
        job.launch(
            f"h{number}",
            *("--nnodes", "2", "--master-addr", endpoint.partition(":")[0]),
            *("--node-rank", str(number), "--nproc-per-node", "1"),
            *("--max-restarts", "1", "--no-python", "sh", script),
        )
    assert [job.exit_code(host) for host in ("h0", "h1")] == [1, 1]
    output = job.hosts.output("h0")
    assert "h1: rank 1 exited with code 7" in output
    assert "no luck, says rank 1" in output
    assert "ranks/1/stderr.log on h1" in output
    assert " on h1" not in job.hosts.output("h1").partition("  log ")[2].partition("\n")[0]
    for host in ("h0", "h1"):
        verdict = job.verdict(host)
        assert verdict["attempts"] == 2
        assert verdict["reason"] == "rank 1 exited with code 7 on h1"
        assert verdict["first_failure"]["rank"] == 1


@pytest.mark.parametrize("job", [2], indirect=True)
def test_a_variable_that_differs_on_one_host_is_refused_before_a_worker_starts(job: Job) -> None:
    for number, algorithm in enumerate(("Ring", "Tree")):
        job.launch(
            f"h{number}",
            *("--nnodes", "2", "--master-addr", job.hosts.address("h0")),
            *("--node-rank", str(number), "--nproc-per-node", "1"),
            *("--no-python", "sh", "-c", "echo started"),
            env={"NCCL_ALGO": algorithm, "NCCL_SOCKET_IFNAME": f"eth{number}"},
        )
    for host in ("h0", "h1"):
        assert job.exit_code(host) == 3
        output = job.hosts.output(host)
        assert "NCCL_ALGO: must be equal on all ranks" in output
        assert "h0  Ring" in output
        assert "h1  Tree" in output
        assert "NCCL_SOCKET_IFNAME" not in output  # this one may differ
        assert "started" not in output.replace("wasn't started", "")
