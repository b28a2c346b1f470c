"""`launch --preflight full` on hosts in network namespaces: who is not fit is left out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Background, Hosts, hosts, why_not
from tests.conftest import LIMIT_S

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.slow,
]

CONF = "keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=3,join_timeout=90"
# What this machine may lack, and no test is about.
IGNORED = ("host.shm", "host.space", "host.pids", "host.name", "host.memlock", "host.readable")
PROFILE = f"""
description = "For tests: what is lost is noticed soon."
kind = "lane"
nodes = "any"
extends = "base"
[timeouts]
stop_grace = "2s"
[preflight]
ignore = {json.dumps(IGNORED)}
"""
WORK = 'echo "try $TORCHELASTIC_RESTART_COUNT rank $RANK of $WORLD_SIZE on $(hostname)"'


class Job:
    """Agents that are to check their nodes and edges before they start ``sh -c WORK``."""

    def __init__(self, made: Hosts, directory: Path) -> None:
        self.hosts, self.directory = made, directory
        self.agents: dict[str, Background] = {}
        self.store = f"{made.address('hub')}:29400"
        (directory / "profile.toml").write_text(PROFILE)

    def serve_store(self) -> None:
        self.hosts.start("hub", "store", "serve", "--all-interfaces", "--port", "29400")

    def launch(
        self,
        host: str,
        *options: str,
        work: str = WORK,
        limit: str = "",
        mode: str = "full",
        env: dict[str, str] | None = None,
    ) -> None:
        command = ["-m", "ncclops", "launch", "--preflight", mode, "--restart", "process"]
        command += ["--profile", str(self.directory / "profile.toml"), "--nproc-per-node", "1"]
        command += ["--run-dir", str(self.directory / host), "--rdzv-conf", CONF]
        command += [*options, "--no-python", "sh", "-c", work]
        shell = ["sh", "-c", f'{limit or ":"}; exec "$@"', "sh"]
        self.agents[host] = self.hosts.run(host, *shell, sys.executable, *command, env=env)

    def codes(self) -> list[int]:
        found = [agent.wait(2 * LIMIT_S) for agent in self.agents.values()]
        for host in self.agents:
            print(f"--- {host}\n{self.hosts.output(host)}")
        return found

    def verdict(self, host: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.directory / host / "verdict.json").read_text())
        return document

    def checked(self, host: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(
            (self.directory / host / "preflight.json").read_text()
        )
        return document


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    count: int = request.param
    with hosts(count, tmp_path) as made:
        yield Job(made, tmp_path)


@pytest.mark.parametrize("job", [3], indirect=True)
@pytest.mark.extended
def test_a_spare_takes_the_place_of_a_host_that_nobody_reaches(job: Job) -> None:
    job.serve_store()
    job.hosts.drop("h1", "to", "opening")
    for number in range(3):
        job.launch(f"h{number}", "--nnodes", "2:3", "--rdzv-endpoint", job.store)
    assert job.codes() == [0, 3, 0]
    why = "no connection passes to h1 from every other host"
    for host in ("h0", "h1", "h2"):
        assert f"FAIL  unreachable  {why}" in job.hosts.output(host)
    for host in ("h0", "h2"):
        assert "preflight: h1 left out of the job; the others meet again" in job.hosts.output(host)
        assert not job.checked(host)["edges"]["failed"], "of those that have started"
    assert "try 0 rank 0 of 2 on h0" in job.hosts.output("h0")
    assert "try 0 rank 1 of 2 on h2" in job.hosts.output("h2")
    assert "try " not in job.hosts.output("h1")
    verdict = job.verdict("h1")
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 3)
    assert verdict["reason"].startswith(f"preflight: this node is left out of the job: {why}")
    checked = job.checked("h1")
    assert (checked["status"], checked["edges"]["excluded"]) == ("FAIL", ["h1"])


@pytest.mark.extended
@pytest.mark.parametrize("job", [3], indirect=True)
def test_a_spare_takes_the_place_of_a_host_that_finds_a_fault_in_itself(job: Job) -> None:
    job.serve_store()
    for number in range(3):
        limit = "ulimit -n 500" if number == 0 else ""
        job.launch(f"h{number}", "--nnodes", "2:3", "--rdzv-endpoint", job.store, limit=limit)
    assert job.codes() == [3, 0, 0]
    for host in ("h1", "h2"):
        assert "FAIL  h0  host.nofile host: 500" in job.hosts.output(host)
    assert "try 0 rank 0 of 2 on h1" in job.hosts.output("h1")
    assert "try 0 rank 1 of 2 on h2" in job.hosts.output("h2")
    assert "left out of the job: host.nofile host: 500" in job.verdict("h0")["reason"]


@pytest.mark.extended
@pytest.mark.parametrize("job", [3], indirect=True)
def test_a_spare_takes_the_place_of_a_host_whose_collectives_fail(job: Job) -> None:
    """All edges work; Gloo of host 1 is led to an interface that is not there."""
    job.serve_store()
    meet = ("--nnodes", "2:3", "--rdzv-endpoint", job.store, "--collectives")
    for number in range(3):
        env = {"GLOO_SOCKET_IFNAME": "ib0"} if number == 1 else None
        job.launch(f"h{number}", *meet, env=env)
    assert job.codes() == [0, 3, 0]
    for host in ("h0", "h1", "h2"):
        assert "FAIL  collective  an all_reduce of h1 with each other" in job.hosts.output(host)
    for host in ("h0", "h2"):
        (pair,) = job.checked(host)["edges"]["pairs"]
        assert pair["well"], "of those that have started"
    assert "try 0 rank 0 of 2 on h0" in job.hosts.output("h0")
    assert "try 0 rank 1 of 2 on h2" in job.hosts.output("h2")
    assert "left out of the job: an all_reduce of h1" in job.verdict("h1")["reason"]


@pytest.mark.parametrize("job", [2], indirect=True)
@pytest.mark.extended
def test_without_a_spare_nothing_starts_and_every_host_names_the_edge(job: Job) -> None:
    """Host 0 serves the store; large packets between the two are lost without notice."""
    job.hosts.ip("hub", "link", "set", "to-h1", "mtu", "1400")
    for number in range(2):
        job.launch(
            f"h{number}",
            *("--nnodes", "2", "--node-rank", str(number)),
            *("--master-addr", job.hosts.address("h0"), "--master-port", "29500"),
        )
    assert job.codes() == [3, 3]
    for host in ("h0", "h1"):
        assert "FAIL  mtu  large packets are lost without notice" in job.hosts.output(host)
        assert job.verdict(host)["reason"].startswith("preflight: the job cannot start: ")
        assert "try " not in job.hosts.output(host)


@pytest.mark.extended
@pytest.mark.parametrize("job", [3], indirect=True)
def test_a_host_that_has_failed_is_checked_again_before_it_comes_back(job: Job) -> None:
    """It loses what it had when it was checked first: descriptors, here."""
    job.serve_store()
    # The limits of the launcher's agent, whose child this is, are what its node's check reads.
    work = (
        f"{WORK}\n"
        '[ "$TORCHELASTIC_RESTART_COUNT" = 0 ] || exit 0\n'
        '[ "$(hostname)" = h1 ] || exec sleep 600\n'
        "prlimit --pid $PPID --nofile=500:500\nexit 7\n"
    )
    options = ("--nnodes", "2:3", "--rdzv-endpoint", job.store, "--max-restarts", "1")
    for number in range(3):
        job.launch(f"h{number}", *options, work=work)
    assert job.codes() == [0, 3, 0]
    assert "FAIL  h1  host.nofile host: 500" in job.hosts.output("h0")
    assert "try 1 rank 0 of 2 on h0" in job.hosts.output("h0")
    assert "try 1 rank 1 of 2 on h2" in job.hosts.output("h2")
    assert "left out of the job: host.nofile" in job.verdict("h1")["reason"]
    assert job.verdict("h0")["attempts"] == 2


@pytest.mark.parametrize("job", [1], indirect=True)
def test_a_single_host_that_has_failed_and_is_not_fit_any_more_ends_the_job(job: Job) -> None:
    work = f"{WORK}\nprlimit --pid $PPID --nofile=500:500\nexit 7\n"
    job.launch("h0", "--max-restarts", "3", work=work, mode="host")
    assert job.codes() == [3]
    output = job.hosts.output("h0")
    assert output.count("try ") == 1
    assert "preflight: this node has failed, and is checked before the next attempt" in output
    assert "this node is not fit for the job: host.nofile host: 500" in job.verdict("h0")["reason"]
