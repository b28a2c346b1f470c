"""Snapshots over real faults: real processes, Gloo, and results that are equal to the last bit."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.testing import Fault, JobFactory, JobResult

from .snapshot_programs import own_state, own_state_with_reserve, replicas, sharded

pytestmark = pytest.mark.slow

STEPS = 30


def restored(result: JobResult, iteration_from: int = 1) -> list[tuple[int | None, str]]:
    """(step, source) of each restore after the first, of all ranks."""
    found = []
    for rank in result.ranks:
        notes = [note.fields for note in result.notes_of("restored", rank)]
        found += [(each["step"], each["source"]) for each in notes[iteration_from:]]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the bits of model and optimizer after all steps."""
    with JobFactory(tmp_path_factory.mktemp("undisturbed")) as job:
        result: str = job(replicas, world_size=2, args=(STEPS, 1)).run().value
    return result


def expect(result: JobResult, source: str, *steps: int) -> None:
    """All ranks have restored the same steps, from ``source``.

    Each is one of ``steps``, or the one before: the last snapshot may have been under way.
    """
    found = restored(result)
    of_rank = len(steps)
    ranks = [found[n : n + of_rank] for n in range(0, len(found), of_rank)]
    assert all(rank == ranks[0] for rank in ranks), found
    assert [where for _, where in ranks[0]] == [source] * of_rank
    for (step, _), newest in zip(ranks[0], steps, strict=True):
        assert step in (newest - 1, newest)


@pytest.mark.extended
def test_an_exception_costs_a_step_or_two(ncclops_job: JobFactory, undisturbed: str) -> None:
    fault = Fault.exception(rank=1, at="step", n=7)
    result = ncclops_job(replicas, world_size=2, args=(STEPS, 1), faults=[fault]).run()
    assert result.value == undisturbed
    expect(result, "memory", 6)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_after_many_random_faults_the_result_is_the_same_to_the_last_bit(
    ncclops_job: JobFactory, undisturbed: str, seed: int
) -> None:
    """Two ranks of four are killed, the others raise and exit anywhere, in ``take`` too."""
    chance = random.Random(seed)
    faults: dict[tuple[int, str, int], Fault] = {}
    for rank in (1, 3):
        faults[rank, "step", 0] = Fault.kill(rank=rank, at="step", n=chance.randrange(5, STEPS))
    for _ in range(20):
        rank, place = (
            chance.choice((0, 2)),
            chance.choice(("step", "reduced", "taken", "initialize")),
        )
        n = chance.randrange(1, STEPS) if place != "initialize" else chance.randrange(1, 4)
        faults[rank, place, n] = Fault.exception(rank=rank, at=place, n=n)
    job = ncclops_job(
        replicas,
        world_size=4,
        args=(STEPS, None if seed % 2 else 1),
        faults=faults.values(),
        all_strike=False,
    )
    result = job.run()
    assert result.lost == result.taken
    assert result.value == undisturbed
    assert len(result.strikes) >= 15, "most of the faults have struck"
    for rank in result.values:
        first, *later = [note.fields for note in result.notes_of("holds", rank)]
        ours = [
            sum(name.startswith("ncclops-snapshot") for name in each["threads"])
            for each in later[-3:]
        ]
        assert min(ours) <= 4, "the server, the iteration's own, and those of two connections"
        least = min(each["descriptors"] for each in later[-3:])
        assert least - first["descriptors"] <= 6, "connections of the last iteration are closed"


def test_a_lost_rank_s_own_state_is_gone_with_its_seat_and_the_others_keep_theirs(
    ncclops_job: JobFactory,
) -> None:
    fault = Fault.kill(rank=1, at="step", n=7)
    result = ncclops_job(own_state, world_size=3, args=(12, None), faults=[fault]).run()
    expect(result, "memory", 6)


def test_a_reserve_takes_the_seat_of_a_lost_rank_with_the_state_that_its_partner_has_kept(
    ncclops_job: JobFactory,
) -> None:
    """All numbers move up, so each rank's state is with its neighbour, and rank 1's with a partner.

    The result is that of an undisturbed run, as each number is played on with its own state.
    """
    undisturbed = ncclops_job(own_state_with_reserve, world_size=4, args=(12, None)).run()
    fault = Fault.kill(rank=1, at="step", n=7)
    result = ncclops_job(
        own_state_with_reserve, world_size=4, args=(12, None), faults=[fault]
    ).run()
    values = [each for each in result.values.values() if each is not None]
    expected = next(each for each in undisturbed.values.values() if each is not None)
    assert values == [expected] * 3
    found = [n.fields for n in result.notes if n.name == "restored" and n.fields["step"]]
    assert sorted(each["source"] for each in found) == ["memory", "partner", "replica"]
    (step,) = {each["step"] for each in found}
    assert step in (5, 6), "the last copy may have been on its way to the partner"


def test_a_partner_pair_that_is_lost_falls_back_to_the_checkpoint_and_says_so(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    """Rank 1's copy is with rank 2. Both go, and two reserves take over."""
    faults = [Fault.lost_host(rank=1, at="step", n=7, ranks=[1, 2])]
    result = ncclops_job(
        own_state_with_reserve, world_size=5, args=(12, tmp_path), faults=faults
    ).run()
    later = [n.fields for n in result.notes if n.name == "restored" and n.fields["passed_over"]]
    assert [(each["step"], each["source"]) for each in later] == [(2, "checkpoint")] * 3
    assert all("nobody has the own state of rank" in each["passed_over"] for each in later)


def test_the_shards_of_fsdp2_are_restored_to_the_last_bit(ncclops_job: JobFactory) -> None:
    undisturbed = ncclops_job(sharded, world_size=2, args=(12,)).run()
    faults = [
        Fault.exception(rank=1, at="step", n=7),
        Fault.exception(rank=0, at="reduced", n=12),
    ]
    result = ncclops_job(sharded, world_size=2, args=(12,), faults=faults).run()
    assert result.values == undisturbed.values
    expect(result, "memory", 6, 11)


@pytest.mark.extended
def test_with_hybrid_sharding_the_loss_of_a_replica_costs_no_state(
    ncclops_job: JobFactory,
) -> None:
    """Of two pairs one loses a rank: the other pair goes on, and a reserve is left."""
    undisturbed = ncclops_job(sharded, world_size=2, args=(12,)).run()
    fault = Fault.kill(rank=0, at="step", n=7)
    result = ncclops_job(sharded, world_size=4, args=(12,), faults=[fault]).run()
    values = sorted(each for each in result.values.values() if each is not None)
    assert values == sorted(undisturbed.values.values()), "the ranks' numbers have changed"
    found = [n.fields for n in result.notes if n.name == "restored" and n.fields["step"]]
    assert {each["step"] for each in found} in ({5}, {6})
    assert {each["source"] for each in found} <= {"memory", "replica"}


def test_a_new_process_in_a_lost_place_takes_the_state_from_others(
    ncclops_job: JobFactory,
) -> None:
    """Whole again, the job ends with the bits of an undisturbed one of the same size."""
    undisturbed = ncclops_job(replicas, world_size=3, args=(STEPS, 1)).run()
    job = ncclops_job(
        replicas,
        world_size=3,
        args=(STEPS, 1),
        faults=[Fault.kill(rank=1, at="step", n=7)],
        wrapper={"grow_timeout": timedelta(seconds=30)},
    ).start()
    job._until(lambda: job._started().ranks[1].code is not None, "the end of rank 1")
    job.replace(1)
    result = job.wait()
    assert result.values == undisturbed.values
    found = {n.rank: n.fields for n in result.notes_of("restored", 1)}
    assert found[1]["step"] in (5, 6), "the last copy of what is its own may have been on its way"
    assert found[1]["source"] in ("replica", "partner")
