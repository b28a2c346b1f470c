"""Groups beside the default one are kept over a fault with their connections, or made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ncclops.testing import JobFactory
from tests.fakegpu.host import Host
from tests.fakegpu.place import HERE
from tests.restart import pair_programs as programs

from .conftest import Job, lanes
from .test_grow import entered, kill
from .test_regrouping import in_incident

pytestmark = pytest.mark.slow

PROGRAM = f"{programs.__name__}:pairs"


def start(job: Job, size: int, *faults: tuple[str, int, str], **parameters: Any) -> Job:
    """``size`` ranks in pairs; in each iteration a scene, and which rank faults in it, and how."""
    by_iteration = {str(number): fault for number, fault in enumerate(faults)}
    return job.start(size, PROGRAM, faults=by_iteration, size=size, **parameters)


def kept(job: Job, rank: int) -> list[bool]:
    """Whether ``rank`` has its pair's group of before, by iteration."""
    return [e["same"] for e in job.events("grouped", rank=rank)]


def rungs(job: Job) -> list[tuple[str, str, str | None]]:
    """What the file of each incident says of the pairs' groups."""
    said = in_incident(job)
    return [(each["group"], each["rung"], each["why"]) for each in said if "(" in each["group"]]


def test_the_pair_that_lost_nobody_keeps_its_connections(job: Job) -> None:
    assert start(job, 4, ("idle", 1, "dies")).wait() == {0: 0, 1: -9, 2: 0, 3: 0}
    assert [kept(job, rank) for rank in (0, 2, 3)] == [[False, False], [False, True], [False, True]]
    for rank in (2, 3):
        before, after = (e["connections"] for e in job.events("grouped", rank=rank))
        assert before == after and len(before) == 1
    assert rungs(job) == [
        ("pair 0 (0)", "anew", "no group of before has just these members, in this order"),
        ("pair 1 (1, 2)", "kept", None),
    ]


@pytest.mark.parametrize(
    ("scene", "why"),
    [
        ("waiting", "rank 1: an operation of it was under way"),
        ("async", "rank 1: an operation of it was under way"),
        ("messages", "rank 1: messages between two ranks (send, recv) were sent in it"),
    ],
)
def test_a_pair_in_which_something_was_under_way_is_made_anew(
    job: Job, scene: str, why: str
) -> None:
    """The fault finds one rank in an operation that the other one has not come to."""
    assert start(job, 4, (scene, 0, "dies")).wait() == {0: -9, 1: 0, 2: 0, 3: 0}
    assert [kept(job, rank) for rank in (1, 2, 3)] == [[False, False]] * 3
    assert rungs(job)[1] == ("pair 1 (1, 2)", "anew", why)


def test_an_advisory_that_concerns_one_rank_rules_it_out_for_all(job: Job) -> None:
    """Of the pair of ranks 2 and 3, whose numbers are 1 and 2 then."""
    assert start(job, 4, ("idle", 1, "dies"), advised=3).wait() == {0: 0, 1: -9, 2: 0, 3: 0}
    assert [kept(job, rank) for rank in (0, 2, 3)] == [[False, False]] * 3
    why = "rank 2: advisory torch-keeps-badly: groups that are kept lose messages"
    assert rungs(job)[1] == ("pair 1 (1, 2)", "anew", why)


def test_several_faults_in_a_row(job: Job) -> None:
    faults = [("idle", 1, "raises"), ("waiting", 1, "raises")]
    faults += [("idle", 4, "dies"), ("idle", 3, "dies")]
    assert start(job, 6, *faults).wait() == {0: 0, 1: 0, 2: 0, 3: -9, 4: -9, 5: 0}
    assert kept(job, 0) == kept(job, 1) == [False, True, True, True, True]
    assert kept(job, 2) == [False, True, False, True, False]
    assert kept(job, 5) == [False, True, True, False, True]


@lanes("nccl-eager", extended=("nccl",))
@pytest.mark.skipif(
    HERE.torch >= (2, 15), reason="of torch's second engine it is not known which groups are idle"
)
def test_nccl_keeps_the_communicator(job: Job, host: Host) -> None:
    faults = [("idle", 1, "dies"), ("waiting", 0, "raises")]
    assert start(job, 4, *faults).wait() == {0: 0, 1: -9, 2: 0, 3: 0}
    assert kept(job, 0) == [False, False, True]
    for rank in (2, 3):
        assert kept(job, rank) == [False, True, False]
    made = [e.fields["ranks"] for e in host.events("nccl-init")]
    assert made.count("2") == 4 + 2, "two pairs at first, and pair 1 after the second fault"


def test_the_groups_of_a_mesh_are_kept_each_by_itself(job: Job) -> None:
    assert job.start(4, f"{programs.__name__}:in_a_mesh").wait() == {0: 0, 1: 0, 2: 0, 3: -9}
    for rank in (0, 1, 2):
        came = [(e["shape"], e["kept"]) for e in job.events("grouped", rank=rank)]
        assert came == [([2, 2], []), ([2, 2], ["replicate", "shard"]), ([1, 3], [])]


def test_a_pair_is_kept_while_a_lost_rank_comes_back_in_another(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    lost = ncclops_job(programs.grows, world_size=4, args=(str(stop),)).start()
    for iteration in range(3):
        now = entered(lost, iteration, 4)
        assert [now[rank].fields["same"] for rank in range(4)] == [False] * 2 + [iteration > 0] * 2
        if iteration < 2:
            kill(lost, iteration)
            lost.replace(iteration)
    stop.touch()
    lost.wait()
