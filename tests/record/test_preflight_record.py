"""``preflight.json`` as readers of a run see it."""

from __future__ import annotations

from ncclops.record.preflight_record import (
    CheckFound,
    EdgesChecked,
    HostChecked,
    HostMet,
    PreflightRecord,
)

OWN = CheckFound(check="host.shm", status="FAIL", subject="host")
MET = CheckFound(check="nic.state", status="WARN", subject="mlx5_0")


def test_what_a_host_found_itself_stands_before_what_it_told_the_others() -> None:
    edges = EdgesChecked(hosts=(HostMet(name="a", findings=(MET,)), HostMet(name="b")))
    record = PreflightRecord(
        status="FAIL", hosts=(HostChecked(name="a", findings=(OWN,)),), edges=edges
    )
    assert record.findings() == {"a": (OWN,), "b": ()}


def test_a_single_node_has_no_edges() -> None:
    record = PreflightRecord(status="OK", hosts=(HostChecked(name="a"),))
    assert record.findings() == {"a": ()}
