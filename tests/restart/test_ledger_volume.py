"""What thousands of ranks store and read when a death makes the collective of every one fail."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist

from ncclops.restart._planning import PlannedAssigner
from ncclops.restart.agreement import INITIAL, Agreement, Arrival
from ncclops.restart.attribution import Fault, FaultKind
from ncclops.restart.compose import Compose
from ncclops.restart.ledger import Ledger
from ncclops.restart.rank_assignment import ActivateAllRanks, FillGaps, ShiftRanks

pytestmark = pytest.mark.slow

SOON = timedelta(seconds=5)
NOBODY: frozenset[int] = frozenset()
RANKS, LOST = 4096, 77
TRACEBACK = "Traceback (most recent call last):\n" + '  File "train.py", line 1, in f\n' * 250


class Counted:
    """A store that counts the bytes of all values, the operations, and the keys read at once."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.stored = self.read = self.operations = self.keys_read = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)
        if not callable(operation):
            return operation

        def counted(*arguments: Any) -> Any:
            result = operation(*arguments)
            self.operations += 1
            if name in ("check", "multi_get"):
                self.keys_read += len(arguments[0])
            self.stored += size(arguments[1:])
            self.read += size(result)
            return result

        return counted


def size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    return len(value) if isinstance(value, (str, bytes)) else 8 * isinstance(value, int)


def symptom(rank: int) -> Fault:
    text = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:123"
    return Fault(FaultKind.EXCEPTION, rank, rank, 0, time.time(), text, TRACEBACK)


def death(rank: int, iteration: int = 0) -> Fault:
    detail = "the process died: killed by SIGKILL"
    summary = f"rank {rank}: {detail}"
    return Fault(FaultKind.DIED, rank, rank, iteration, time.time(), summary, gone=True)


@pytest.mark.parametrize("renumber", [ShiftRanks, FillGaps])
def test_a_death_costs_a_megabyte_beyond_what_each_rank_needs_for_itself(renumber: Any) -> None:
    store = Counted()
    planner = PlannedAssigner(Compose(ActivateAllRanks(), renumber())).planner
    ledger = Ledger(store, RANKS, planner)
    for rank in range(RANKS):
        ledger.arrive(INITIAL, Arrival(rank, rank, RANKS), NOBODY)
    survivors = [rank for rank in range(RANKS) if rank != LOST]
    store.stored = store.read = 0
    for rank in survivors[:2000]:
        ledger.record_fault(0, symptom(rank))
    ledger.record_gone(0, death(LOST), NOBODY)
    for rank in survivors[2000:]:
        ledger.record_fault(0, symptom(rank))
    for rank in survivors:
        ledger.arrive(0, Arrival(rank, rank, RANKS), NOBODY)
    assert store.stored < 500_000
    assert store.read < 500_000
    already_read = store.read
    agreements = {ledger.wait_for_agreement(0, rank, SOON)[0] for rank in survivors}
    # its place, who has gone, and the fault that caused the others
    assert store.read - already_read < 1000 * len(survivors)
    (agreement,) = agreements
    assert agreement.gone == agreement.lost == {LOST}
    assert agreement.brief
    assert [fault.initial_rank for fault in agreement.faults] == [LOST]
    whole = ledger.whole_agreement(0)
    assert whole is not None
    assert sorted(whole.faulty) == list(range(RANKS))
    assert whole.in_brief() == agreement


def test_few_ranks_read_what_all_groups_have_counted() -> None:
    """The last rank of each group comes after all other ranks of the job."""
    ranks, per_group = 16_384, 40
    store = Counted()
    ledger = Ledger(
        store, ranks, PlannedAssigner(Compose(ActivateAllRanks(), ShiftRanks())).planner
    )
    by_place = sorted(range(ranks), key=lambda rank: rank % per_group)
    for rank in by_place:
        ledger.arrive(INITIAL, Arrival(rank, rank, ranks), NOBODY)
    groups, forties = 410, 11
    # Each in two operations; the one that agrees reads logs, too.
    assert store.keys_read < 2 * (40 * groups + groups * forties) + 10
    store.keys_read = 0
    for rank in by_place:
        returned = Fault.of_early_return(rank, rank, 0)
        ledger.record_completion(0, rank, ranks, returned)
    assert store.keys_read < 2 * (40 * groups + groups * forties) + 10
    assert ledger.wait_for_outcome(0, SOON) == "completed"


def test_the_first_exception_keeps_its_traceback_however_many_follow() -> None:
    ledger = Ledger(dist.HashStore(), 200)
    ledger.record_fault(0, symptom(3))
    cause = Fault(FaultKind.EXCEPTION, 5, 5, 0, time.time(), "KeyError: 'lr'", TRACEBACK)
    for rank in range(10, 60):
        ledger.record_fault(0, symptom(rank))
    ledger.record_fault(0, cause)
    agreement = all_arrive(ledger, 200, NOBODY)
    assert cause in agreement.faults
    assert agreement.faulty[0] == 3
    assert set(agreement.faulty) == {3, 5, *range(10, 60)}


def test_all_ranks_of_many_hosts_that_are_lost_together_are_in_the_incident() -> None:
    ledger = Ledger(dist.HashStore(), 200)
    lost = frozenset(range(40, 180))
    for rank in sorted(lost):
        ledger.record_gone(0, death(rank), NOBODY)
    agreement = all_arrive(ledger, 200, lost)
    assert agreement.lost == agreement.gone == set(agreement.faulty) == lost


def test_what_an_iteration_has_left_in_the_store_is_deleted() -> None:
    store = dist.HashStore()
    planner = PlannedAssigner(Compose(ActivateAllRanks(), ShiftRanks())).planner
    ledger, sizes = Ledger(store, 100, planner), []
    for iteration in range(INITIAL, 12):
        for rank in range(100):
            if iteration != INITIAL:
                ledger.record_fault(iteration, symptom(rank))
        for rank in range(100):
            ledger.arrive(iteration, Arrival(rank, rank, 100), NOBODY)
        sizes.append(store.num_keys())
    assert len(set(sizes[5:])) == 1


def all_arrive(ledger: Ledger, ranks: int, lost: frozenset[int]) -> Agreement:
    for rank in sorted(set(range(ranks)) - lost):
        ledger.arrive(0, Arrival(rank, rank, ranks), NOBODY)
    return ledger.wait_for_agreement(0, 0, SOON)[0]
