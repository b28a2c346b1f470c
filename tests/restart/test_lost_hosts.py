"""Hosts that are lost together are all noticed; a neighbour that cannot reach a rank costs none.

Each rank has an address of its own, as on a host of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Job, wait_until
from .rank_processes import processes
from .test_store_connection import lost


def host(rank: int) -> str:
    return f"127.0.0.{rank + 1}"


def is_linked(job: Job, rank: int) -> bool:
    return "watching the monitor process of rank" in job.monitor_log(rank)


@pytest.mark.parametrize(
    ("world", "doomed"),
    [
        pytest.param(4, [1, 2], marks=pytest.mark.extended),
        (5, [1, 2, 3]),
        pytest.param(3, [1, 2], marks=pytest.mark.extended),
        (4, [0, 3]),
    ],
    ids=str,
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


class _Path:
    """The path between rank 1's host and the others, which do not reach it when it is broken."""

    def __init__(self, network: str) -> None:
        self._route = ["ip", "-n", network, "route"]
        self._local = ["local", "127.0.0.0/8", "dev", "lo", "table", "local"]

    def breaks(self) -> None:
        subprocess.run([*self._route, "del", *self._local], check=True)

    def is_back(self) -> None:
        subprocess.run([*self._route, "add", *self._local], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.extended), 3])
def test_a_broken_path_between_two_monitor_processes_costs_no_rank(
    network: str, tmp_path: Path, world: int
) -> None:
    """No monitor process reaches that of rank 1 for a while, which reaches all others.

    When the path is back, rank 1 is watched again: its host is lost then, and that is noticed.
    """
    with processes(tmp_path, world, network) as ranks:
        here = {"NCCLOPS_RESTART_HOST": "127.0.0.1"}
        ranks.start(here, {1: {"NCCLOPS_RESTART_HOST": "127.0.0.9"}})
        ranks.wait_for_all("entered 0")
        watching, path = "watching the monitor process of rank 1", _Path(network)
        ranks.wait_for("monitor-log-0", watching)
        path.breaks()
        ranks.wait_for("monitor-log-0", "rank 1 suspected")
        ranks.wait_for("log-0", "rank 1 lives")
        path.is_back()
        ranks.wait_for("monitor-log-0", watching, 2)
        assert ranks.incidents() == []
        monitor = int((tmp_path / "monitor-1.pid").read_text())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (monitor, ranks.processes[1].pid):
                os.kill(pid, number)
        ranks.go()
        assert ranks.wait() == [-signal.SIGKILL if rank == 1 else 0 for rank in range(world)]
        assert ranks.incidents() and all("lost (1,)" in line for line in ranks.incidents())
