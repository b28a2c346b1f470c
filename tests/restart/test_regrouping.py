"""The default group of a loop that goes on: reconfigured where torch can, else made anew, on all.

What needs torch 2.14 runs with
``FAKE_GPU_TORCH=2.14.0 scripts/fake_gpu python -m pytest tests/restart/test_regrouping.py``.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from ncclops.restart._groups.in_place import has_reconfigure
from tests.restart import keep_going_programs as programs

from .conftest import Job
from .test_keep_going import expect_same_objects, start

pytestmark = pytest.mark.slow

reconfigures = pytest.mark.skipif(
    not has_reconfigure(), reason="torch 2.14 and newer can reconfigure groups, and this is older"
)


def outcomes(job: Job, rank: int) -> list[tuple[str, bool, int]]:
    """Each time that ``rank`` has come to its group: the rung, whether it is the object of before,
    and the size of the world."""
    return [(e["rung"], e["same"], e["size"]) for e in job.events("regrouped", rank=rank)]


def in_incident(job: Job) -> list[dict[str, Any]]:
    """What the file of each incident says of groups, in their order."""
    paths = (job.directory / "incidents").glob("*/incident.json")
    documents = [json.loads(path.read_text()) for path in sorted(paths)]
    return [group for document in documents for group in document["groups"]]


@reconfigures
def test_the_group_is_the_same_object_after_an_exception_and_without_a_rank_that_died(
    job: Job,
) -> None:
    codes = start(job, 3, {0: "dies", 2: "regroup"}, groups="kept").wait()
    assert codes == {0: -9, 1: 0, 2: 0}
    expect_same_objects(job, {1, 2})
    for rank in (1, 2):
        came = outcomes(job, rank)
        assert came[0] == ("anew", False, 3)
        assert came[1:] == [("reconfigured", True, 2)] * len(came[1:])
        assert came[1:], "the fault in on_membership may come before the other rank is done"
        (last,) = job.events("regrouped", rank=rank)[-1:]
        assert last["ranks"] == [0, 1]
    said = in_incident(job)
    assert {(each["group"], each["rung"], each["why"]) for each in said} == {
        ("default", "reconfigured", None)
    }


@reconfigures
def test_all_make_it_anew_when_one_of_them_has_no_group_of_before(job: Job) -> None:
    assert set(start(job, 3, {1: "before", 2: "raises"}, groups="kept").wait().values()) == {0}
    expect_same_objects(job, {0})
    last = [job.events("regrouped", rank=rank)[-1] for rank in range(3)]
    assert {each["rung"] for each in last} <= {"anew", "reconfigured"}
    assert len({(each["rung"], each["why"]) for each in last}) == 1


@reconfigures
def test_all_make_it_anew_when_a_reconfiguration_fails_on_one_of_them(job: Job) -> None:
    """Rank 1 does not find the others' addresses; they wait for it until the deadline."""
    codes = start(job, 3, {0: "raises"}, groups="kept", within=2, cut=1).wait()
    assert set(codes.values()) == {0}
    expect_same_objects(job, {0, 1, 2})
    for rank in range(3):
        later = job.events("regrouped", rank=rank)[1]
        assert (later["rung"], later["same"]) == ("anew", False)
        assert "the reconfiguration failed: rank 0: " in later["why"]
    (said,) = in_incident(job)
    assert said["rung"] == "anew"


@reconfigures
@pytest.mark.parametrize("after_ms", [0.0, 2.0, 2.5, 4.0, 7.0, 10.0, 15.0, 30.0])
def test_a_rank_that_dies_in_a_reconfiguration_costs_no_other_one(
    job: Job, after_ms: float
) -> None:
    """Wherever in it: the others may wait for it in the store, or in Gloo for its connection."""
    program = "tests.restart.regrouping_programs:dies_in_a_reconfiguration"
    assert job.start(4, program, after_ms=after_ms).wait() == {0: 0, 1: 0, 2: -9, 3: 0}
    for returned in job.events("returned"):
        first, second, *_, last = returned["value"]
        assert (first, second) == ([0, "anew", 4], [1, "reconfigured", 4])
        assert (last[0], last[2]) == (3, 3)


def test_ddp_goes_on_whatever_pass_it_was_interrupted_in(job: Job) -> None:
    """Also over a group that was made anew. Before it was made on all ranks, all make it."""
    program = "tests.restart.regrouping_programs"
    faults = ["making", "backward", "forward", "backward"]
    codes = job.start(2, f"{program}:ddp_goes_on", faults=faults).wait()
    assert set(codes.values()) == {0}
    later = "reconfigured" if has_reconfigure() else "anew"
    for returned in job.events("returned"):
        value = returned["value"]
        begun = 1 + (returned["rank"] == 0)
        assert (value["made"], value["rungs"]) == (begun, ["anew", *[later] * len(faults)])
        wanted = import_module(program).expected([0, 1])
        assert value["gradients"] == pytest.approx(wanted, rel=1e-4)
    causes = {(e["iteration"], e["exception"]) for e in job.events("incident")}
    assert causes == {(number, "ValueError: as asked") for number in range(len(faults))}


@pytest.mark.skipif(has_reconfigure(), reason="this torch can reconfigure groups")
def test_without_such_a_torch_the_group_is_made_anew_and_the_incident_says_why(job: Job) -> None:
    assert set(start(job, 2, {1: "raises"}, groups="kept").wait().values()) == {0}
    expect_same_objects(job, {0, 1})
    for rank in (0, 1):
        assert outcomes(job, rank) == [("anew", False, 2)] * 2
    (said,) = in_incident(job)
    assert said["group"] == "default" and said["rung"] == "anew"
    assert "cannot reconfigure groups, 2.14 and newer can" in said["why"]


def test_it_is_refused_outside_of_on_membership(job: Job) -> None:
    assert job.start(1, f"{programs.__name__}:groups_elsewhere").wait() == {0: 0}
    (returned,) = job.events("returned")
    where = "init_process_group() is for use in on_membership, of keep_going()"
    assert returned["value"] == [where, where]
