"""In a job of several hosts, the ranks of each share a relay, without any setting."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Background, Hosts, hosts, why_not
from tests.conftest import LIMIT_S

from .conftest import wait_until
from .rank_processes import PROGRAM

pytestmark = pytest.mark.slow

PORT = 29400
HOSTS = ("h0", "h1")


class Job:
    """Four ranks on two hosts, and the store on a third."""

    def __init__(self, made: Hosts) -> None:
        self._hosts = made
        made.start("hub", "store", "serve", "--all-interfaces", "--port", str(PORT))
        self.ranks = [self._start(rank) for rank in range(4)]

    def _start(self, rank: int) -> Background:
        host, store = HOSTS[rank // 2], self._hosts.address("hub")
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "NCCLOPS_STORE": f"{store}:{PORT}",
            "MASTER_ADDR": store,
        }
        return self._hosts.run(host, sys.executable, PROGRAM, self._hosts.directory, env=environ)

    def wait_for(self, line: str) -> None:
        """Until each rank has printed it."""
        wait_until(
            lambda: all(self._hosts.output(host).count(line) == 2 for host in HOSTS), f"{line!r}"
        )

    def connections(self, host: str) -> Counter[int]:
        """How many to the store each process of ``host`` has."""
        listed = self._hosts.sockets(host, "state", "established", f"dport = :{PORT}")
        return Counter(map(int, re.findall(r"pid=(\d+)", listed)))

    def relays(self) -> list[int] | None:
        """Those of the hosts, once each has one and its ranks no other connections than one for
        their process group; rank 0 has one more."""
        pids = [rank.pid for rank in self.ranks]
        found = []
        for host in HOSTS:
            connections = self.connections(host)
            others = [pid for pid in connections if pid not in pids]
            own = {pid: 1 + (pid == pids[0]) for pid in connections if pid in pids}
            if len(others) != 1 or connections != Counter(own | {others[0]: 2}):
                return None
            found += others
        return found


@pytest.fixture
def job(starts_processes: None, tmp_path: Path) -> Iterator[Job]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with hosts(2, tmp_path) as made:
        yield Job(made)


def test_the_ranks_of_each_host_share_a_relay(job: Job, tmp_path: Path) -> None:
    job.wait_for("entered 0")
    relays = wait_until(job.relays, "a relay on each host")
    (tmp_path / "fail-3").touch()
    job.wait_for("entered 1")
    assert wait_until(job.relays, "the same relays") == relays
    os.kill(relays[1], signal.SIGKILL)
    (tmp_path / "go").touch()
    assert [rank.wait(LIMIT_S) for rank in job.ranks] == [0, 0, 0, 0]
