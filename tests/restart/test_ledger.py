"""The ledger over real stores: agreement whatever the order of arrivals, deaths and repeats."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ncclops.restart import ledger as ledgers
from ncclops.restart._assignment.planning import PlannedAssigner
from ncclops.restart._assignment.world import Place, Placement
from ncclops.restart.agreement import INITIAL, Arrival, numbers_claimed_and_left
from ncclops.restart.attribution import Fault, FaultKind, condense, find_cause, without_repeats
from ncclops.restart.compose import Compose
from ncclops.restart.ledger import Ledger
from ncclops.restart.rank_assignment import ActivateAllRanks, FillGaps, ShiftRanks
from ncclops.restart.store import PrefixStore

SOON = timedelta(seconds=20)
NOBODY: frozenset[int] = frozenset()


def fault(initial_rank: int, kind: FaultKind = FaultKind.DIED, **fields: object) -> Fault:
    given = {"iteration": 0, "at": time.time(), "summary": "x", "rank": initial_rank, "gone": True}
    return Fault(kind=kind, initial_rank=initial_rank, **{**given, **fields})  # type: ignore[arg-type]


@pytest.fixture(params=["tcp", "file", "hash"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], dist.Store]]:
    if request.param == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, None, True, SOON, wait_for_workers=False)
        yield lambda: PrefixStore(
            "job",
            dist.TCPStore("127.0.0.1", server.port, None, False, SOON, wait_for_workers=False),
        )
    elif request.param == "file":
        path = str(tmp_path / "store")
        yield lambda: PrefixStore("job", dist.FileStore(path, -1))
    else:
        store = dist.HashStore()
        yield lambda: PrefixStore("job", store)


def test_the_barrier_is_complete_when_everybody_arrived_or_went(
    connect: Callable[[], dist.Store],
) -> None:
    ledger = Ledger(connect(), 3)
    ledger.arrive(0, Arrival(0, 0, 3), NOBODY)
    ledger.record_fault(0, fault(1))
    ledger.record_gone(0, fault(1), NOBODY)
    ledger.record_gone(0, fault(1), NOBODY)  # the neighbour has seen it, too
    assert not connect().check(["0/done"])
    ledger.arrive(0, Arrival(2, 2, 3), NOBODY)
    agreement, placement = ledger.wait_for_agreement(0, 0, SOON)
    assert agreement.gone == {1}
    assert agreement.terminated == {1}
    assert agreement.faulty == (1,)
    assert placement is None


EVENTS = [("arrive", 0), ("arrive", 1), ("arrive", 2), ("gone", 1), ("gone", 1)]


@pytest.mark.parametrize("order", sorted(set(itertools.permutations(EVENTS))))
def test_any_order_of_events_ends_in_an_agreement(order: tuple[tuple[str, int], ...]) -> None:
    """Rank 1 arrives and is then (or was before) reported gone, twice: it never counts as two."""
    store = PrefixStore("job", dist.HashStore())
    ledger = Ledger(store, 3)
    for number, (event, rank) in enumerate(order):
        if event == "arrive":
            ledger.arrive(0, Arrival(rank, rank, 3), NOBODY)
        else:
            ledger.record_gone(0, fault(rank), NOBODY)
        done = store.check(["0/done"])
        seen = {r for _, r in order[: number + 1]}
        assert done == (seen == {0, 1, 2})


def test_a_writer_that_dies_between_append_and_count_is_made_good_by_its_report() -> None:
    store = PrefixStore("job", dist.HashStore())
    ledger = Ledger(store, 2)
    store.append("0/arrivals", Arrival(1, 1, 2).to_json() + "\n")  # and then it was killed
    ledger.arrive(0, Arrival(0, 0, 2), NOBODY)
    assert not store.check(["0/done"])
    ledger.record_gone(0, fault(1), NOBODY)
    assert ledger.wait_for_agreement(0, 0, SOON)[0].gone == {1}


def test_one_outcome_wins(connect: Callable[[], dist.Store]) -> None:
    one, other = Ledger(connect(), 2), Ledger(connect(), 2)
    one.record_completion(0, 0, 1, Fault.of_early_return(0, 0, 0))
    other.record_fault(0, fault(1))
    assert one.wait_for_outcome(0, SOON) == (ledgers.COMPLETED, None)
    other.record_fault(1, fault(1))
    one.record_completion(1, 0, 1, Fault.of_early_return(0, 0, 1))
    assert other.wait_for_outcome(1, SOON) == (ledgers.FAULT, None)


def test_the_rank_that_completes_the_barrier_plans_for_all(
    connect: Callable[[], dist.Store],
) -> None:
    planner = PlannedAssigner(Compose(ActivateAllRanks(), ShiftRanks())).planner
    found: dict[int, Place | None] = {}

    def rank(number: int) -> None:
        ledger = Ledger(connect(), 4, planner)
        ledger.arrive(INITIAL, Arrival(number, number, 4), NOBODY)
        ledger.wait_for_agreement(INITIAL, number, SOON)
        if number == 1:
            ledger.record_gone(0, fault(1), NOBODY)
        else:
            ledger.arrive(0, Arrival(number, number, 4), NOBODY)
        found[number] = ledger.wait_for_agreement(0, number, SOON)[1]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {
        0: Placement(0, 3, 3),
        1: None,
        2: Placement(1, 3, 3),
        3: Placement(2, 3, 3),
    }


def test_a_report_completes_the_work_of_a_planner_that_died() -> None:
    """``done`` is there, the placements are not: the rank that reports the death plans."""
    store = PrefixStore("job", dist.HashStore())
    planner = PlannedAssigner(Compose(ActivateAllRanks(), ShiftRanks())).planner
    without_plan, ledger = Ledger(store, 2), Ledger(store, 2, planner)
    for rank in (0, 1):
        without_plan.arrive(INITIAL, Arrival(rank, rank, 2), NOBODY)
    assert store.check(["-1/done"])
    ledger.record_gone(0, fault(1), NOBODY)
    ledger.record_gone(INITIAL, fault(1), NOBODY)
    assert ledger.wait_for_agreement(INITIAL, 0, SOON)[1] == Placement(0, 2, 2), (
        "as before the death"
    )


def test_numbers_of_the_lost_from_reports_arrivals_and_what_is_left() -> None:
    arrivals = [Arrival(0, 0, 5), Arrival(3, 2, 5), Arrival(4, 3, 5)]
    gone = [
        fault(9, iteration=0),  # had gone before
        fault(3, rank=None),  # arrived, then died
        fault(7, rank=1, iteration=1),  # reported with its number
        fault(8, rank=None),  # lost without a trace: it had the number that no other rank has
    ]
    assert numbers_claimed_and_left(1, gone, arrivals, {9}) == {1, 2, 4}


def test_numbers_of_the_lost_by_the_world_that_was_planned() -> None:
    store = PrefixStore("job", dist.HashStore())
    planner = PlannedAssigner(Compose(ActivateAllRanks(), FillGaps())).planner
    ledger = Ledger(store, 4, planner)
    gone: frozenset[int] = frozenset()
    for iteration, lost, numbers in ((INITIAL, None, set()), (0, 1, {1}), (1, 3, {1})):
        for rank in set(range(4)) - gone - {lost}:
            ledger.arrive(iteration, Arrival(rank, rank, 4), gone)
        if lost is not None:
            ledger.record_gone(iteration, fault(lost, rank=None), gone)
        agreement, _ = ledger.wait_for_agreement(iteration, 0, SOON)
        assert agreement.terminated == numbers  # rank 3 took the number of rank 1
        gone = agreement.gone


def test_the_cause_is_not_a_symptom() -> None:
    broken = fault(
        0, FaultKind.EXCEPTION, summary="RuntimeError: Connection closed by peer", gone=False
    )
    slow = fault(2, FaultKind.SOFT_TIMEOUT, gone=False)
    late = fault(3, FaultKind.EXCEPTION, summary="no group", secondary=True, gone=False)
    dead = fault(1)
    assert find_cause([late, broken, slow, dead]) is dead
    assert find_cause([late, slow, broken]) is slow
    assert find_cause([dead, fault(4)]) is dead


def test_repeats_and_masses_of_faults_are_condensed() -> None:
    many = [fault(n, FaultKind.EXCEPTION, traceback="t", secondary=n != 60) for n in range(100)]
    kept = condense(without_repeats([*many, *many]))
    assert len(kept) == 32
    assert [f.initial_rank for f in kept if f.traceback] == [60]


def test_what_groups_of_earlier_iterations_have_left_is_found(
    connect: Callable[[], dist.Store],
) -> None:
    store = connect()
    for key in ("2/groups/a", "10/groups/a", "2/call0/0/outcome", "2/outcome", "gone", "groups/a"):
        store.set(key, "")
    ledger = Ledger(store, 2)
    found = ledger.outdated(10)
    assert sorted(found) == ["2/call0/0/outcome", "2/groups/a"]
    ledger.delete(found)
    assert ledger.outdated(10) == []


def test_a_rank_is_waited_for_in_vain_when_it_has_left_the_function() -> None:
    """By its number: rank 0 has gone in iteration 0, and the ranks 1 to 3 have been renumbered."""
    store = PrefixStore("job", dist.HashStore())
    ledger = Ledger(store, 4, PlannedAssigner(Compose(ShiftRanks())).planner)
    for rank in range(4):
        ledger.arrive(INITIAL, Arrival(rank, rank, 4), NOBODY)
    ledger.record_gone(0, fault(0), NOBODY)
    assert ledger.is_waited_for_in_vain(0, {0, 1})
    assert not ledger.is_waited_for_in_vain(0, {1, 2})
    for rank in (1, 2, 3):
        ledger.arrive(0, Arrival(rank, rank, 4), NOBODY)
    ledger.record_fault(1, fault(3, FaultKind.REQUESTED, iteration=1, gone=False))
    assert not ledger.is_waited_for_in_vain(1, None)
    assert ledger.cause_so_far(2) is None
    cause = ledger.cause_so_far(1)
    assert cause is not None
    assert cause.initial_rank == 3
    ledger.arrive(1, Arrival(3, 2, 3), frozenset({0}))
    assert ledger.is_waited_for_in_vain(1, {0, 2})
    assert ledger.is_waited_for_in_vain(1, None)
    assert not ledger.is_waited_for_in_vain(1, {0, 1})


@pytest.mark.parametrize(
    ("finished", "unfinished"),
    [
        pytest.param({1, 2}, {0}, id="all that are left"),
        pytest.param({0, 1, 2}, set(), id="and the lost one as well"),
        pytest.param({1}, None, id="one of two"),
        pytest.param(set(), None, id="none"),
    ],
)
def test_who_had_not_finished_when_none_of_them_is_left(
    finished: set[int], unfinished: set[int] | None
) -> None:
    """Rank 0 is lost, and the ranks 1 and 2 are renumbered."""
    ledger = Ledger(
        PrefixStore("job", dist.HashStore()),
        3,
        PlannedAssigner(Compose(ActivateAllRanks(), ShiftRanks())).planner,
    )
    for rank in range(3):
        ledger.arrive(INITIAL, Arrival(rank, rank, 3), NOBODY)
    ledger.record_gone(0, fault(0), NOBODY)
    for rank in finished:
        ledger.record_completion(0, rank, 3, Fault.of_early_return(rank, rank, 0))
    for rank in (1, 2):
        ledger.arrive(0, Arrival(rank, rank, 3), NOBODY)
    assert ledger.unfinished(0) == unfinished


@pytest.mark.parametrize(
    ("kind", "in_vain"), [(FaultKind.EXCEPTION, True), (FaultKind.NCCL_ERROR, False)]
)
def test_a_rank_that_has_raised_has_left_the_function(kind: FaultKind, *, in_vain: bool) -> None:
    ledger = Ledger(PrefixStore("job", dist.HashStore()), 2)
    ledger.record_fault(0, fault(1, kind, gone=False))
    assert ledger.is_waited_for_in_vain(0, None) == in_vain


def test_all_are_waited_for_in_vain_when_one_was_silent() -> None:
    """It may wait with the others, for what does not come."""
    ledger = Ledger(PrefixStore("job", dist.HashStore()), 3)
    ledger.record_fault(0, fault(1, FaultKind.SOFT_TIMEOUT, gone=False))
    assert ledger.is_waited_for_in_vain(0, None)
