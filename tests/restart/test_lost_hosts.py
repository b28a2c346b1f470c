"""Hosts that are lost together are all noticed; a neighbour that cannot reach a rank costs none.

Each rank has an address of its own, as on a host of its own.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import why_not
from tests.conftest import LIMIT_S, clean_environ, free_port

from .conftest import Job, wait_until
from .test_store_connection import lost


def host(rank: int) -> str:
    return f"127.0.0.{rank + 1}"


def is_linked(job: Job, rank: int) -> bool:
    return "watching the monitor process of rank" in job.monitor_log(rank)


@pytest.mark.parametrize(
    ("world", "doomed"), [(4, [1, 2]), (5, [1, 2, 3]), (3, [1, 2]), (4, [0, 3])], ids=str
)
def test_hosts_that_are_lost_together_are_all_reported(
    job: Job, world: int, doomed: list[int]
) -> None:
    """Also all but one, and the one that looks for them has never reached the later ones."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ncclops", "store", "serve", "--port", str(job.port)],
        stdout=subprocess.PIPE,
    )
    try:
        job.env["NCCLOPS_STORE"] = f"127.0.0.1:{job.port}"
        job.env_of = {rank: {"NCCLOPS_RESTART_HOST": host(rank)} for rank in range(world)}
        job.start(world, "store_programs:working").wait_for("entered", count=world)
        wait_until(lambda: all(is_linked(job, rank) for rank in range(world)), "the ring")
        monitors = [job.monitor_process(rank) for rank in doomed]
        both = [*monitors, *(job.pids[rank] for rank in doomed)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in both:
                os.kill(pid, number)
        left = sorted(set(range(world)) - set(doomed))
        (job.directory / "go").touch()
        assert job.wait() == dict.fromkeys(left, 0) | dict.fromkeys(doomed, -signal.SIGKILL)
        assert lost(job) == set(doomed)
        assert {e["rank"] for e in job.events("returned")} == set(left)
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def network() -> Iterator[str]:
    """A network namespace in which every 127.0.0.0/8 address is a host."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    name = f"nc{secrets.token_hex(3)}-hosts"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_broken_path_between_two_monitor_processes_costs_no_rank(
    network: str, tmp_path: Path, world: int
) -> None:
    """No monitor process reaches that of rank 1 any more, which reaches all others."""
    port, ranks = free_port(), []
    for rank in range(world):
        program = [sys.executable, str(Path(__file__).with_name("lost_hosts.py")), str(tmp_path)]
        identity = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCLOPS_RESTART_HOST": "127.0.0.1" if rank != 1 else "127.0.0.9",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with (tmp_path / f"log-{rank}").open("wb") as log:
            started = subprocess.Popen(
                ["ip", "netns", "exec", network, *program],
                env=clean_environ(identity),
                stdout=log,
                stderr=log,
            )
        ranks.append(started)

    def says(log: str, line: str) -> bool:
        path = tmp_path / log
        return path.exists() and line in path.read_text()

    try:
        entered = lambda: all(says(f"log-{rank}", "entered 0") for rank in range(world))  # noqa: E731
        wait_until(entered, "all in the function")
        watching = "watching the monitor process of rank 1"
        wait_until(lambda: says("monitor-log-0", watching), "the link to be watched")
        route = ["local", "127.0.0.0/8", "dev", "lo", "table", "local"]
        subprocess.run(["ip", "-n", network, "route", "del", *route], check=True)
        wait_until(lambda: says("monitor-log-0", "rank 1 suspected"), "the suspicion")
        wait_until(lambda: says("log-0", "rank 1 lives"), "the answer")
        (tmp_path / "go").touch()
        assert [process.wait(LIMIT_S) for process in ranks] == [0] * world
        assert not any(says(f"log-{rank}", "incident") for rank in range(world))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
