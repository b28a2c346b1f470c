"""Which nodes take no part after the check of all, and when there is no job at all."""

from __future__ import annotations

import pytest

from ncclops.cluster.left_out import Conclusion, conclude
from ncclops.preflight.edges.model import Cause, Facts, Shape, Verdict
from ncclops.preflight.model import Finding, Status

BAD = Finding(
    check="gpu.ecc", status=Status.FAIL, subject="GPU 3", read="2 errors", wanted="none", remedy="."
)


def facts(rank: int, *findings: Finding) -> Facts:
    return Facts(name=f"n{rank}", uid=f"{rank:032x}", rank=rank, findings=findings)


def edge(a: int, b: int) -> Cause:
    return dead("edge", (a,), (b,))


def dead(
    shape: Shape, a: tuple[int, ...], b: tuple[int, ...] = (), hosts: tuple[int, ...] = ()
) -> Cause:
    return Cause(
        kind="unreachable",
        severity="FAIL",
        shape=shape,
        symptom="dead",
        a=a,
        b=b,
        how="timeout",
        hosts=hosts,
    )


def after(
    *causes: Cause,
    hosts: tuple[Facts, ...] = (),
    count: int = 4,
    active: int = 3,
    serving: int | None = None,
    replaceable: bool = True,
    lost: tuple[int, ...] = (),
) -> Conclusion:
    hosts = hosts or tuple(facts(rank) for rank in range(count))
    return conclude(
        Verdict(hosts=hosts, causes=causes, expected=count),
        [f"n{rank}" for rank in range(count)],
        active=active,
        serving=serving,
        replaceable=replaceable,
        lost=lost,
    )


def test_nobody_is_left_out_where_nothing_fails() -> None:
    assert after() == Conclusion()
    warning = Cause(kind="slow", severity="WARN", shape="host", symptom="slow", a=(1,), hosts=(1,))
    assert after(warning) == Conclusion()


def test_a_convicted_host_and_one_with_a_fault_of_its_own_are_left_out() -> None:
    hosts = (facts(0), facts(1), facts(2), facts(3, BAD), facts(4))
    found = after(dead("host-in", (1,), hosts=(1,)), hosts=hosts, count=5)
    assert found.refused is None
    assert list(found.left_out) == [1, 3]
    assert found.left_out[1].startswith("no connection passes to n1 from every other host")
    assert found.left_out[3] == "gpu.ecc GPU 3: 2 errors"


def test_hosts_are_counted_by_their_rank_and_not_by_their_place_in_the_verdict() -> None:
    """One that did not take part has no place there."""
    hosts = (facts(0), facts(2), facts(3))
    found = after(dead("host-in", (1,), hosts=(1,)), hosts=hosts, active=2)
    assert list(found.left_out) == [1, 2]
    assert found.left_out[1].startswith("it took no part in the check")


def test_one_of_two_hosts_that_do_not_reach_each_other_is_left_out() -> None:
    """The later one, which is the spare; the one with more such edges; never the store's."""
    assert list(after(edge(1, 2)).left_out) == [2]
    assert list(after(edge(1, 2), edge(1, 3)).left_out) == [1]
    assert list(after(edge(1, 2), serving=2).left_out) == [1]
    assert list(after(edge(1, 2), dead("host", (1,), hosts=(1,))).left_out) == [1]
    assert after(edge(1, 2)).left_out[2].endswith("; one of both is left out")


def test_a_node_that_is_lost_meanwhile_is_left_out() -> None:
    assert after(lost=(2,)).left_out == {2: "it was lost during the check"}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (after(edge(0, 1), active=4), "3 nodes are left, and the job needs 4"),
        (after(dead("host", (1,), hosts=(1,)), serving=1), "n1 serves the job's store"),
        (after(edge(0, 1), replaceable=False), "with --rdzv-backend static no other"),
        (after(dead("group", (0, 1), (2, 3))), "no single node can be left out for that"),
        (after(dead("everything", (0, 1, 2, 3))), "no single node can be left out for that"),
    ],
)
def test_the_job_is_refused_where_no_spare_helps(found: Conclusion, why: str) -> None:
    assert found.refused is not None
    assert why in found.refused
    assert not found.left_out
