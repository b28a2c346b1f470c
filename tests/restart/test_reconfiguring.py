"""The default group of a loop that goes on, on torch's second NCCL engine: reconfigured.

``FAKE_GPU_TORCH=2.15.0 scripts/fake_gpu python -m pytest tests/restart/test_reconfiguring.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fakegpu.host import Host
from tests.fakegpu.place import HERE

from .conftest import Job, lanes, wait_until
from .test_shrinking import AT_FIRST, expect_fallback, expect_trained, rungs, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not HERE.has_second_engine, reason="torch 2.15 and newer can reconfigure groups of NCCL"
    ),
]

ALWAYS_THREE = [sum(1.0 + step for step in range(6))] * 5  # also what the mean of ranks 0 and 2 is


def start_here(job: Job, size: int, faults: dict[int, tuple[int, str]], **parameters: Any) -> None:
    start(job, size, faults, **{"shrink": False, "reconfigure": True, **parameters})


def made(host: Host, ranks: int) -> Counter[str]:
    """By which function communicators of so many ranks have come to be there, and how often."""
    all_ = [e.fields for e in host.events("nccl-init") if e.fields["ranks"] == str(ranks)]
    assert {each["error"] for each in all_} <= {"0"}
    return Counter(e["function"] for e in all_ if e["function"] != "ncclCommSplit")


@lanes("nccl-eager")
@pytest.mark.parametrize("grows", [False, True], ids=["new", "shrunk"])
def test_ddp_goes_on_and_trains_to_the_same_result(job: Job, host: Host, grows: bool) -> None:
    """An error that NCCL reports is ours to find: torch's watchdog would end the wait for it, and
    what has not been summed would be taken for the gradient."""
    job.env["TORCH_NCCL2_RECONFIGURE_SHRINK_GROW"] = str(int(grows))
    host.set("comm:0 rank=0 nth=10 error=ncclRemoteError")  # in the second step
    start_here(job, 3, {3: (1, "dies")}, ddp=True)
    assert job.wait() == {0: 0, 1: -9, 2: 0}
    expect_trained(job, [3, 3, 3, 2, 2, 2])
    assert all(e["value"]["weights"] == ALWAYS_THREE for e in job.events("returned"))
    later = [("reconfigured", None, 3), ("reconfigured", None, 2)]
    assert rungs(job) == [(*AT_FIRST, 3), *later]
    causes = [(e["cause"], e["first_faulty_rank"]) for e in job.events("incident", rank=0)]
    assert causes == [("nccl-error", 0), ("died", 1)]
    how = "ncclCommShrink" if grows else "ncclCommInitRankConfig"
    assert made(host, 2) == {how: 2}
    ended = {e.fields["how"] for e in host.events("nccl-end") if e.fields["ranks"] == "3"}
    assert ended == {"Abort"}, "no rank that has died takes part in an orderly end"


@lanes("nccl-eager")
@pytest.mark.parametrize("grows", [False, True], ids=["new", "grown"])
def test_a_rank_that_comes_back_joins_the_group_of_the_others(
    job: Job, host: Host, grows: bool
) -> None:
    job.env["TORCH_NCCL2_RECONFIGURE_SHRINK_GROW"] = str(int(grows))
    start_here(job, 3, {3: (2, "dies")}, ddp=True, grow=True)
    watch = job.ranks._started()
    wait_until(lambda: watch.ranks[2].code is not None, "the end of rank 2")
    job.ranks.replace(2)
    assert job.wait() == {0: 0, 1: 0, 2: 0}
    assert all(e["value"]["weights"] == ALWAYS_THREE for e in job.events("returned"))
    assert [e["rung"] for e in job.events("regrouped", rank=0)] == ["anew", "reconfigured"]
    assert [e["rung"] for e in job.events("regrouped", rank=2)] == ["anew", "reconfigured"]
    again = {"ncclCommGrow": 3} if grows else {"ncclCommInitRankConfig": 3}
    assert made(host, 3) == Counter({"ncclCommInitRankConfig": 3}) + Counter(again)
    assert made(host, 2) == ({"ncclCommShrink": 2} if grows else {})


@lanes("nccl-eager")
def test_messages_are_sent_again_after_a_fault_in_the_middle_of_a_batch(job: Job) -> None:
    """Its group would collect all messages, for the end of that batch."""
    start_here(job, 3, {3: (1, "raises in a batch")})
    assert job.wait() == {0: 0, 1: 0, 2: 0}
    expect_trained(job, [3] * 6)
    assert rungs(job) == [(*AT_FIRST, 3), ("reconfigured", None, 3)]


@lanes("nccl-eager")
@pytest.mark.parametrize(
    ("rule", "within", "why"),
    [
        ("error=ncclRemoteError", 600, "the reconfiguration failed: rank 1: "),
        ("hang", 2, "the reconfiguration failed: "),
        ("hang", 40, ""),
    ],
    ids=["fails", "hangs", "dies"],
)
def test_all_make_it_anew_where_that_fails_or_hangs_on_a_rank_or_it_dies_in_it(
    job: Job, host: Host, rule: str, within: int, why: str
) -> None:
    host.set(f"ncclCommInitRankConfig rank=2 nth=2 {rule}")
    if why:
        start_here(job, 3, {3: (1, "dies")}, within=within)
        expect_fallback(job, why)
        return
    start_here(job, 4, {3: (1, "dies")}, within=within)
    host.wait_for("fault")
    job.kill(2)
    assert job.wait() == {0: 0, 1: -9, 2: -9, 3: 0}
    expect_trained(job, [4, 4, 4, 2, 2, 2])
    assert rungs(job) == [(*AT_FIRST, 4), (*AT_FIRST, 2)]
