"""A name server that hangs costs no rank: names are needed at the start, and addresses later."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import clean_environ

from .conftest import wait_until
from .rank_processes import processes

pytestmark = pytest.mark.slow

# The longest that the resolver can be set to: 5 times 30 s for each lookup.
RESOLV_CONF = "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n"
THIS_HOST = f"127.0.0.1 localhost {socket.gethostname()}\n"
MOUNT = (
    'mount --bind "$0/resolv.conf" /etc/resolv.conf && mount --bind "$0/hosts" /etc/hosts'
    ' && mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf && exec "$@"'
)


class NameServer:
    """One that hangs, and the files of the hosts that use it."""

    def __init__(self, network: str, directory: Path) -> None:
        self._hosts = directory / "hosts"
        self._queries = directory / "queries"
        self._hosts.write_text(THIS_HOST)
        (directory / "resolv.conf").write_text(RESOLV_CONF)
        (directory / "nsswitch.conf").write_text("hosts: files dns\n")
        program = [
            sys.executable,
            str(Path(__file__).with_name("mute_name_server.py")),
            str(self._queries),
        ]
        self.process = subprocess.Popen(["ip", "netns", "exec", network, *program])
        self.user = ["unshare", "--mount", "sh", "-c", MOUNT, str(directory)]
        wait_until(self._queries.exists, "the name server")

    def knows(self, **addresses: str) -> None:
        """From now on the hosts know these names, and no others, without a name server."""
        lines = "".join(f"{address} {name}\n" for name, address in addresses.items())
        self._hosts.write_text(THIS_HOST + lines)  # in place: it is mounted

    @property
    def queries(self) -> list[str]:
        return self._queries.read_text().splitlines()


@pytest.fixture
def name_server(network: str, tmp_path: Path) -> Iterator[NameServer]:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("mount namespaces cannot be made here")
    made = NameServer(network, tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_a_name_server_that_hangs_after_the_start_costs_no_rank(
    network: str, tmp_path: Path, name_server: NameServer
) -> None:
    """A rank fails, and a monitor process has to be replaced, when no name is known any more."""
    name_server.knows(master="127.0.0.7", node1="127.0.0.8")
    with processes(tmp_path, 2, network) as ranks:
        restart_host = {1: {"NCCLOPS_RESTART_HOST": "node1"}}
        ranks.start({"MASTER_ADDR": "master"}, restart_host, through=name_server.user)
        ranks.wait_for_all("entered 0")
        watching = "watching the monitor process of rank 1"
        ranks.wait_for("monitor-log-0", watching)
        name_server.knows()
        os.kill(int((tmp_path / "monitor-1.pid").read_text()), signal.SIGKILL)
        ranks.wait_for("monitor-log-0", watching, 2)
        (tmp_path / "fail-1").touch()
        ranks.wait_for_all("entered 1")
        ranks.go()
        assert ranks.wait() == [0, 0]
        assert set(ranks.incidents()) == {"incident: ValueError: boom; lost ()"}
    assert not {"master", "node1"} & set(name_server.queries)


def test_a_job_starts_though_the_name_of_the_ring_is_not_answered_for(
    network: str, tmp_path: Path, name_server: NameServer
) -> None:
    with processes(tmp_path, 2, network) as ranks:
        environ_of = {1: {"NCCLOPS_RESTART_HOST": "node1.example"}}
        ranks.start({"MASTER_ADDR": "127.0.0.7"}, environ_of, through=name_server.user)
        ranks.wait_for_all("entered 0")
        assert "no answer to the lookup of 'node1.example'" in ranks.log("log-1")
        ranks.go()
        assert ranks.wait() == [0, 0]
        assert ranks.incidents() == []
    assert "node1.example" in name_server.queries


CONNECT = """
from datetime import timedelta
from ncclops.restart.store import TCPStore
TCPStore("master.example", 29400, 2, timeout=timedelta(seconds=1))
"""


def test_connecting_ends_at_its_timeout_and_says_why(
    network: str, tmp_path: Path, name_server: NameServer
) -> None:
    environ = clean_environ({"RANK": "1", "WORLD_SIZE": "2"})
    command = ["ip", "netns", "exec", network, *name_server.user, sys.executable, "-c", CONNECT]
    # The limit is that of a test that hangs; the resolver would take longer than that.
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert "DistNetworkError: the store at master.example:29400: no answer to" in done.stderr
    assert "put the name into /etc/hosts" in done.stderr
