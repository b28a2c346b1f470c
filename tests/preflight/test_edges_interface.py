"""Where NCCL would listen: its rules, over made interfaces."""

from __future__ import annotations

import pytest

from ncclops.preflight.edges.interface import choose, comm_id_address, read, spread
from ncclops.preflight.edges.meeting import Where
from ncclops.preflight.edges.model import Address


def v4(name: str, address: str, *, running: bool = True) -> Address:
    return Address(interface=name, address=address, prefix=24, family=4, running=running)


def v6(name: str, address: str) -> Address:
    return Address(interface=name, address=address, prefix=64, family=6)


NODE = [
    v4("lo", "127.0.0.1"),
    v4("docker0", "172.17.0.1"),
    v4("eth0", "10.0.1.5"),
    v4("eth1", "10.0.2.5"),
    v6("lo", "::1"),
    v6("eth0", "fd00::5"),
]


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, "10.0.1.5"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, "10.0.2.5"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "10.0.1.5"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, None),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, "10.0.2.5"),
        ({"NCCL_SOCKET_IFNAME": "^eth0,lo,docker"}, "10.0.2.5"),
        ({"NCCL_SOCKET_IFNAME": "^=lo,docker0"}, "10.0.1.5"),
        ({"NCCL_SOCKET_IFNAME": "ens3"}, None),
        ({"NCCL_SOCKET_IFNAME": "docker0"}, "172.17.0.1"),
        ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, "fd00::5"),
        ({"NCCL_SOCKET_FAMILY": "AF_INET6", "NCCL_SOCKET_IFNAME": "eth1"}, None),
        ({"NCCL_COMM_ID": "10.0.2.77:4000"}, "10.0.2.5"),
        ({"NCCL_COMM_ID": "10.0.9.77:4000"}, None),
        ({"NCCL_COMM_ID": "10.0.2.77:4000", "NCCL_SOCKET_IFNAME": "eth0"}, "10.0.2.5"),
    ],
)
def test_the_interface_that_variables_lead_to(environ: dict[str, str], wanted: str | None) -> None:
    chosen = choose(NODE, environ)
    assert (chosen.address if chosen else None) == wanted


def test_infiniband_comes_first_and_docker_and_loopback_last() -> None:
    assert choose([*NODE, v4("ib0", "10.8.0.5")], {}) == v4("ib0", "10.8.0.5")
    assert choose(NODE[:2], {}) == v4("docker0", "172.17.0.1")
    assert choose(NODE[:1], {}) == v4("lo", "127.0.0.1")
    assert choose([v4("virbr0", "192.168.122.1"), *NODE[:1]], {}) == v4("lo", "127.0.0.1")
    assert choose([], {}) is None


def test_an_interface_without_a_carrier_is_passed_over() -> None:
    down = v4("eth0", "10.0.1.5", running=False)
    assert choose([down, v4("eth1", "10.0.2.5")], {}) == v4("eth1", "10.0.2.5")


def test_addresses_of_comm_ids() -> None:
    assert str(comm_id_address("10.0.2.77:4000")) == "10.0.2.77"
    assert str(comm_id_address("[fd00::9]:4000")) == "fd00::9"
    assert comm_id_address("node1:4000") is None
    assert comm_id_address("") is None


def test_the_ports_that_stand_for_a_range() -> None:
    assert spread(32768, 60999, 3) == [32768, 46883, 60999]
    assert spread(5, 6, 8) == [5, 6]
    assert spread(5, 5, 4) == [5]


def test_this_machine_has_addresses_in_the_kernels_order() -> None:
    found = read()
    assert any(each.address == "127.0.0.1" for each in found)
    assert [each.family for each in found] == sorted(each.family for each in found)


def test_a_link_local_address_is_reached_by_the_interface_that_is_named() -> None:
    """A name server or the resolver gives it without that."""
    where = Where(host="fe80::1%eth0", port=29400, count=2, least=2)
    assert where.scoped("fe80::1") == "fe80::1%eth0"
    assert where.scoped("fd00::1") == "fd00::1"
    assert where.scoped("10.0.0.1") == "10.0.0.1"
    plain = Where(host="h0", port=29400, count=2, least=2)
    assert plain.scoped("fe80::1") == "fe80::1"
