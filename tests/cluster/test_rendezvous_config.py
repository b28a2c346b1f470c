"""torchrun's options for several nodes, as values, and a clear refusal of what does not fit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import pytest

from ncclops.cluster.rendezvous_config import RendezvousConfig, parse_pace, parse_rendezvous
from ncclops.errors import UsageError
from ncclops.host import interfaces
from ncclops.schedulers.node_options import NodeOptions


def rendezvous(store: str | None = None, **given: Any) -> RendezvousConfig | None:
    return parse_rendezvous(NodeOptions(**given), store=store)


def several(**given: Any) -> RendezvousConfig:
    found = rendezvous(**given)
    assert found is not None
    return found


def test_one_node_needs_no_rendezvous_whatever_a_torchrun_line_says() -> None:
    assert rendezvous() is None
    assert rendezvous(nnodes="1:1", rdzv_backend="etcd", rdzv_endpoint="localhost:0") is None


def test_static_by_the_address_of_node_0() -> None:
    found = several(nnodes="2", node_rank=1, master_addr="n0")
    assert (found.backend, found.address, found.rank) == ("static", "n0:29500", 1)
    assert several(nnodes="2", rdzv_backend="static", rdzv_endpoint="n0:1234").port == 1234


def test_an_endpoint_alone_is_c10d() -> None:
    found = several(nnodes="4:5", rdzv_endpoint="n0", rdzv_id="run7")
    assert (found.backend, found.address, found.rank) == ("c10d", "n0:29400", None)
    assert (found.active, found.most, found.job_id) == (4, 5, "run7")


def test_an_address_of_ipv6() -> None:
    found = several(nnodes="2", rdzv_endpoint="[fd00::1]:7000")
    assert (found.host, found.port, found.address) == ("fd00::1", 7000, "[fd00::1]:7000")


def test_a_store_elsewhere_is_hosted_by_no_node() -> None:
    found = several(nnodes="2", node_rank=0, master_addr="n0", store="s:1")
    assert (found.address, found.external) == ("s:1", True)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"nnodes": "0"}, "--nnodes"),
        ({"nnodes": "two"}, "--nnodes"),
        ({"nnodes": "4:2"}, "spares"),
        ({"nnodes": "2"}, "--master-addr"),
        ({"nnodes": "2", "rdzv_backend": "c10d"}, "--rdzv-endpoint"),
        ({"nnodes": "2", "rdzv_backend": "etcd", "rdzv_endpoint": "n0:1"}, "--rdzv-backend"),
        ({"nnodes": "2", "master_addr": "n0", "node_rank": 2}, "--node-rank"),
        ({"nnodes": "2", "rdzv_endpoint": "n0:99999"}, "HOST:PORT"),
        ({"nnodes": "2", "rdzv_endpoint": "n0", "rdzv_conf": "join=5"}, "--rdzv-conf"),
        ({"nnodes": "2", "rdzv_endpoint": "n0", "rdzv_conf": "join_timeout=x"}, "--rdzv-conf"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        rendezvous(**given)


def test_the_configuration_of_torchs_rendezvous() -> None:
    pace = parse_pace("join_timeout=90, keep_alive_interval=2,keep_alive_max_attempt=4,is_host=1")
    assert pace.join == timedelta(seconds=90)
    assert pace.lost_after == timedelta(seconds=8)
    assert pace.hosts_store is True
    assert parse_pace(None).lost_after == timedelta(seconds=15)


class TestIsHere:
    OWN: ClassVar = {"10.0.0.5": "eth0", "192.168.7.5": "ib0"}

    def test_any_of_our_interfaces_counts(self) -> None:
        """A name that leads to another interface than the host's own name does is ours as well."""
        assert interfaces.is_here("n5-ib", self.OWN, lambda _: ["192.168.7.5"])

    def test_a_name_that_leads_to_the_loopback_means_us(self) -> None:
        """Debian's 127.0.1.1 for the own name: torchrun's host then hosts nothing."""
        assert interfaces.is_here("n5", self.OWN, lambda _: ["127.0.1.1"])

    def test_others_and_the_unknown_are_elsewhere(self) -> None:
        assert not interfaces.is_here("n6", self.OWN, lambda _: ["10.0.0.6"])
        assert not interfaces.is_here("nowhere", self.OWN, lambda _: [])
