"""The default group of a loop that goes on, on NCCL: shrunk if ranks were lost, else made anew."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakegpu.host import Host
from tests.fakegpu.place import HERE

from .conftest import Job, lanes
from .test_regrouping import in_incident

pytestmark = pytest.mark.slow

first_engine = pytest.mark.skipif(
    HERE.has_second_engine, reason="torch's second engine of NCCL shrinks no group"
)

PROGRAM = "tests.restart.regrouping_programs:on_gpus"
AT_FIRST = ("anew", "no rank had a group")


def start(job: Job, size: int, faults: dict[int, tuple[int, str]], **parameters: Any) -> Job:
    """``size`` ranks train; ``faults`` has who dies or raises, by the step before which."""
    by_step = {str(step): fault for step, fault in faults.items()}
    given = {"shrink": True, "ddp": False, **parameters, "faults": by_step}
    return job.start(size, PROGRAM, **given)


def rungs(job: Job) -> list[tuple[str, str | None, int]]:
    """How the ranks that are left have come to their groups: all alike."""
    left = {e["rank"] for e in job.events("returned")}
    came = [
        [(e["rung"], e["why"], e["size"]) for e in job.events("regrouped", rank=rank)]
        for rank in sorted(left)
    ]
    assert came and all(each == came[0] for each in came)
    return came[0]


def expect_trained(job: Job, sizes: list[int]) -> None:
    """On all ranks that are left: the same weights, and steps in worlds of these sizes.

    A fault may find some ranks before the end of a step, which then comes from another rank. Where
    it finds all of them there, they do that step again in the world that is left.
    """
    values = [e["value"] for e in job.events("returned")]
    assert len({tuple(each["weights"]) for each in values}) == 1
    for step, allowed in enumerate(zip(sizes, [*sizes[1:], sizes[-1]], strict=True)):
        taken = {each["sizes"].get(str(step)) for each in values} - {None}
        assert len(taken) <= 1 and taken <= set(allowed), (step, taken)
    assert all(len(each["sizes"]) > len(sizes) - 3 for each in values)


def expect_fallback(job: Job, why: str) -> None:
    """Rank 1 of three died; the others have made their group anew, for the reason ``why``."""
    assert job.wait() == {0: 0, 1: -9, 2: 0}
    expect_trained(job, [3, 3, 3, 2, 2, 2])
    at_first, later = rungs(job)
    assert at_first == (*AT_FIRST, 3)
    assert (later[0], later[2]) == ("anew", 2)
    assert later[1] is not None and why in later[1]


@first_engine
@lanes("nccl-eager")
@pytest.mark.parametrize(
    "shrink", [True, pytest.param(False, marks=pytest.mark.extended)], ids=["shrunk", "anew"]
)
def test_ddp_goes_on_and_trains_to_the_same_result(job: Job, host: Host, shrink: bool) -> None:
    start(job, 3, {3: (1, "dies")}, ddp=True, shrink=shrink)
    assert job.wait() == {0: 0, 1: -9, 2: 0}
    expect_trained(job, [3, 3, 3, 2, 2, 2])
    (weights,) = {tuple(e["value"]["weights"]) for e in job.events("returned")}
    assert weights == (sum(1.0 + step for step in range(6)),) * 5  # what the mean of any two is
    (said,) = in_incident(job)
    assert (said["group"], said["rung"]) == ("default", "shrunk" if shrink else "anew")
    if not shrink:
        return
    assert rungs(job) == [(*AT_FIRST, 3), ("shrunk", None, 2)]
    made = [e.fields for e in host.events("nccl-init") if e.fields["function"] == "ncclCommShrink"]
    assert [(each["ranks"], each["error"]) for each in made] == [("2", "0")] * 2
    ended = {e.fields["how"] for e in host.events("nccl-end") if e.fields["ranks"] == "3"}
    assert ended == {"Abort"}, "no rank that has died takes part in an orderly end"


@first_engine
@lanes("nccl-eager")
def test_it_is_shrunk_once_and_where_a_rank_was_lost(job: Job) -> None:
    faults = {1: (0, "raises"), 2: (1, "dies"), 4: (2, "dies")}
    assert start(job, 4, faults).wait() == {0: 0, 1: -9, 2: -9, 3: 0}
    expect_trained(job, [4, 4, 3, 3, 2, 2])
    assert rungs(job) == [
        (*AT_FIRST, 4),
        ("anew", "no rank was lost", 4),
        ("shrunk", None, 3),
        ("anew", "rank 0 and 1 more has a group that was shrunk already", 2),
    ]


@first_engine
@lanes("nccl-eager")
@pytest.mark.parametrize(
    ("rule", "within", "why"),
    [
        # The others' NCCL would wait for that rank for ever.
        ("ncclCommShrink rank=2 error=ncclRemoteError", 600, "shrinking failed: rank 1: torch.di"),
        ("ncclCommShrink rank=2 hang=forever", 2, "shrinking failed: not all ranks have done it"),
        ("ncclCommRevoke rank=2 error=ncclInternalError", 2, "rank 1 could not revoke its commun"),
    ],
)
def test_it_is_made_anew_where_that_fails_or_hangs_on_a_rank(
    job: Job, host: Host, rule: str, within: int, why: str
) -> None:
    host.set(rule)
    expect_fallback(start(job, 3, {3: (1, "dies")}, within=within), why)


@first_engine
@lanes("nccl-eager")
def test_a_rank_that_dies_while_it_is_shrunk_costs_no_other_one(job: Job, host: Host) -> None:
    host.set("ncclCommShrink rank=3 hang=forever")
    start(job, 4, {3: (1, "dies")}, within=40)
    host.wait_for("fault")
    job.kill(3)
    assert job.wait() == {0: 0, 1: -9, 2: 0, 3: -9}
    expect_trained(job, [4, 4, 4, 2, 2, 2])
    assert rungs(job) == [(*AT_FIRST, 4), ("anew", "no rank had a group", 2)]
