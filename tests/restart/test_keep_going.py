"""A training loop goes on with its objects: they are made once, whatever faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ncclops.testing import JobFactory
from tests.restart import keep_going_programs as programs
from tests.restart.test_grow import entered, kill

from .conftest import Job, lanes

pytestmark = pytest.mark.slow

MODULE = "tests.restart.keep_going_programs"


def start(job: Job, size: int, faults: dict[int, str], **parameters: Any) -> Job:
    """``size`` ranks, some of which fault."""
    by_rank = {str(rank): how for rank, how in faults.items()}
    return job.start(size, f"{MODULE}:keeps_going", faults=by_rank, **parameters)


def expect_same_objects(job: Job, ranks: set[int]) -> None:
    """On ``ranks`` the wrapped function was called once, and each step made once, in order."""
    for rank in ranks:
        assert [e["iteration"] for e in job.events("function", rank=rank)] == [0]
        (trained,) = job.events("trained", rank=rank)
        steps = trained["steps"]
        assert steps == sorted(set(steps))
        assert len(steps) >= programs.STEPS - 1, "at most the step of the fault came from another"
        assert trained["weights"] == pytest.approx(programs.undisturbed())
        assert {e["pid"] for e in job.events("regroup", rank=rank)} == {trained["pid"]}


def memberships(job: Job, rank: int) -> list[tuple[Any, Any]]:
    """Old and new numbers of ``rank``, each time that it made the group."""
    return [(e["old"], e["new"]) for e in job.events("regroup", rank=rank)]


@lanes("gloo", "nccl")
def test_all_ranks_go_on_where_they_were(job: Job) -> None:
    assert set(start(job, 2, {1: "raises"}).wait().values()) == {0}
    expect_same_objects(job, {0, 1})
    for rank in range(2):
        now, later = [0, rank, 2], [1, rank, 2]
        assert memberships(job, rank) == [(None, now), (now, later)]
    steps = [job.events("regroup", rank=rank)[1]["step"] for rank in range(2)]
    # The other one may still be on its way out of the step before when rank 1 faults.
    assert steps in ([programs.FAULT_AT] * 2, [programs.FAULT_AT - 1, programs.FAULT_AT])
    assert {e["first_faulty_rank"] for e in job.events("incident")} == {1}


@lanes("gloo", "nccl")
def test_those_that_are_left_go_on_without_a_rank_that_dies(job: Job) -> None:
    assert start(job, 3, {0: "dies"}).wait() == {0: -9, 1: 0, 2: 0}
    expect_same_objects(job, {1, 2})
    assert memberships(job, 1)[1] == ([0, 1, 3], [1, memberships(job, 1)[1][1][1], 2])


def test_a_fault_while_the_groups_are_made_is_one_like_any_other(job: Job) -> None:
    assert set(start(job, 3, {0: "raises", 2: "regroup"}).wait().values()) == {0}
    expect_same_objects(job, {0, 1, 2})
    assert [new[0] for _, new in memberships(job, 1)][-1] == 2


def test_a_rank_that_faults_outside_of_the_loop_begins_anew_and_gets_the_state(job: Job) -> None:
    """The others are in the loop, where they wait for it to make the group."""
    assert set(start(job, 3, {1: "before"}).wait().values()) == {0}
    expect_same_objects(job, {0, 2})
    assert [e["iteration"] for e in job.events("function", rank=1)] == [0, 1]
    assert memberships(job, 1) == [(None, [1, 1, 3])]
    assert memberships(job, 0) == [(None, [0, 0, 3]), ([0, 0, 3], [1, 0, 3])]


def test_a_rank_that_ends_its_process_is_left_out(job: Job) -> None:
    assert start(job, 3, {1: "leaves"}).wait() == {0: 0, 1: 3, 2: 0}
    expect_same_objects(job, {0, 2})


def test_a_rank_that_is_in_reserve_afterwards_leaves_the_function(job: Job) -> None:
    codes = start(job, 4, {0: "dies"}, assignment="even").wait()
    assert codes == {0: -9, 1: 0, 2: 0, 3: 0}
    values = {e["rank"]: e["value"] for e in job.events("returned")}
    reserve = [rank for rank, value in values.items() if value is None]
    assert len(reserve) == 1
    expect_same_objects(job, {1, 2, 3} - set(reserve))


@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_trained_objects_for_which_there_is_no_state_are_made_anew(
    job: Job, checkpoint: bool
) -> None:
    """They would go on from step 0 with the weights that they have."""
    job.start(
        3,
        f"{MODULE}:trained_before_a_snapshot",
        faults={"1": "raises"},
        checkpoint=checkpoint,
    )
    assert set(job.wait().values()) == {0}
    for rank in range(3):
        assert [e["iteration"] for e in job.events("function", rank=rank)] == [0, 2]
        assert [e["goes_on"] for e in job.events("restored", rank=rank)] == [False, False]
        (returned,) = job.events("returned", rank=rank)
        assert returned["value"] == pytest.approx(programs.undisturbed())
    assert [e["cause"] for e in job.events("incident", rank=0)] == ["exception", "requested"]


def test_a_loop_within_a_loop_is_refused(job: Job) -> None:
    assert job.start(1, f"{MODULE}:nested").wait() == {0: 0}
    (returned,) = job.events("returned")
    assert returned["value"] == "keep_going() is for use outside of what it runs"


def test_those_that_stay_keep_their_objects_when_a_lost_rank_comes_back(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    """Also rank 0, and twice: its new process joins a loop that goes on."""
    stop = tmp_path / "stop"
    lost = ncclops_job(programs.grows, world_size=3, args=(str(stop),)).start()
    first = entered(lost, 0, 3)
    for iteration in (1, 2):
        kill(lost, 0)
        lost.replace(0)
        now = entered(lost, iteration, 3)
        assert [now[rank].fields["number"] for rank in range(3)] == [0, 1, 2]
    stop.touch()
    values = lost.wait().values
    assert values[0] == (0, [(None, 3)], now[0].fields["pid"])
    for rank in (1, 2):
        assert values[rank] == (0, [(None, 3), (3, 3), (3, 3)], first[rank].fields["pid"])
