"""Our choice of an interface is that of libnccl, where it is installed: its listener says which."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from ncclops.env.audit import find_libnccl
from tests.cluster.hosts import Hosts, hosts, why_not
from tests.conftest import LIMIT_S, REPOSITORY

LIBRARY = find_libnccl() or os.environ.get("NCCLOPS_TEST_LIBNCCL")
pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason="no network namespaces here"),
    pytest.mark.skipif(LIBRARY is None, reason="no libnccl here (NCCLOPS_TEST_LIBNCCL)"),
    pytest.mark.slow,
]
CASES: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_SOCKET_IFNAME": "net"},
    {"NCCL_SOCKET_IFNAME": "=net1"},
    {"NCCL_SOCKET_IFNAME": "^docker0,eth,ib"},
    {"NCCL_SOCKET_IFNAME": "lo"},
    {"NCCL_SOCKET_IFNAME": "nothing"},
    {"NCCL_SOCKET_FAMILY": "AF_INET6"},
    {"NCCL_SOCKET_FAMILY": "AF_INET6", "NCCL_SOCKET_IFNAME": "net1"},
    {"NCCL_SOCKET_IFNAME": "=net"},
    {"NCCL_SOCKET_IFNAME": "=net2,net1"},
    {"NCCL_SOCKET_IFNAME": "net2,net1"},
    {"NCCL_SOCKET_IFNAME": "^=net1,eth0"},
    {"NCCL_SOCKET_IFNAME": "^"},
    {"NCCL_SOCKET_IFNAME": "="},
    {"NCCL_SOCKET_IFNAME": ",net2"},
    {"NCCL_SOCKET_IFNAME": "net1:1"},
    {"NCCL_SOCKET_IFNAME": "NET"},
    {"NCCL_SOCKET_IFNAME": "^eth,net,docker,virbr,down"},
    {"NCCL_SOCKET_IFNAME": "down0"},
    {"NCCL_SOCKET_IFNAME": "virbr0"},
    {"NCCL_SOCKET_FAMILY": "AF_INET", "NCCL_SOCKET_IFNAME": "docker"},
    {"NCCL_SOCKET_FAMILY": "AF_UNIX"},
    {"NCCL_COMM_ID": "10.7.2.9:5000"},
    {"NCCL_COMM_ID": "10.99.2.9:5000"},
    {"NCCL_COMM_ID": "10.7.2.9:5000", "NCCL_SOCKET_IFNAME": "net1"},
)
# Afterwards: an InfiniBand interface comes up, and then nothing is left but bridges.
WITH_IB: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_SOCKET_IFNAME": "^ib"},
    {"NCCL_COMM_ID": "10.7.2.9:5000"},
)
BRIDGES: tuple[dict[str, str], ...] = ({}, {"NCCL_SOCKET_IFNAME": "^docker"})
CHOOSE = (
    "import os; from ncclops.preflight.edges import interface as i; "
    "a = i.choose(i.read(), os.environ); print('ours', a.interface, a.address) if a else None"
)


def test_the_same_interface_as_libnccl(tmp_path: Path) -> None:
    with hosts(1, tmp_path) as made:
        for name, address in (
            ("docker0", "172.17.0.1"),
            ("net1", "10.7.1.1"),
            ("net2", "10.7.2.1"),
            ("virbr0", "192.168.122.1"),
            ("down0", "10.7.3.1"),
            ("ib0", "10.7.4.1"),
        ):
            made.ip("h0", "link", "add", name, "type", "veth", "peer", "name", f"{name}-p")
            made.ip("h0", "addr", "add", f"{address}/24", "dev", name)
            made.ip(
                "h0",
                "addr",
                "add",
                f"fd00:{address.split('.')[2]}{name[-1]}::1/64",
                "dev",
                name,
                "nodad",
            )
            made.ip("h0", "link", "set", name, "up" if name not in ("down0", "ib0") else "down")
            made.ip("h0", "link", "set", f"{name}-p", "up")
        compare_all(made, CASES)
        made.ip("h0", "link", "set", "ib0", "up")
        compare_all(made, WITH_IB)
        for name in ("ib0", "net1", "net2", "eth0"):
            made.ip("h0", "link", "set", name, "down")
        compare_all(made, BRIDGES)


def compare_all(made: Hosts, cases: tuple[dict[str, str], ...]) -> None:
    for environ in cases:
        (made.directory / "h0.out").unlink(missing_ok=True)
        shared = {"PYTHONPATH": str(REPOSITORY), "NCCL_DEBUG": "INFO", **environ}
        nccl = [sys.executable, "-m", "tests.preflight.nccl_listener", str(LIBRARY)]
        made.run("h0", *nccl, env=shared).wait(LIMIT_S)
        made.run("h0", sys.executable, "-c", CHOOSE, env=shared).wait(LIMIT_S)
        said = made.output("h0")
        print(environ, said)
        theirs = re.search(r"Bootstrap ?: Using (\S+?):(\S+?)<", said)
        ours = re.search(r"ours (\S+) (\S+)", said)
        assert (ours.groups() if ours else None) == (
            (theirs[1], theirs[2].partition("%")[0]) if theirs else None
        ), environ
