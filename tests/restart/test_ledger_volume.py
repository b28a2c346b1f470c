"""What thousands of ranks store and read when a death makes the collective of every one fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist

from ncclops.restart._assignment.planning import PlannedAssigner
from ncclops.restart.agreement import INITIAL, Agreement, Arrival
from ncclops.restart.attribution import Fault, FaultKind, find_cause
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
        self._lock = threading.Lock()
        self.stored = self.read = self.operations = self.keys_read = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)
        if not callable(operation):
            return operation

        def counted(*arguments: Any) -> Any:
            result = operation(*arguments)
            with self._lock:
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


@pytest.mark.parametrize(
    "renumber", [pytest.param(ShiftRanks, marks=pytest.mark.extended), FillGaps]
)
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


class _Together:
    """A store on which each of ``threads`` threads first reads when all have come to read."""

    def __init__(self, store: Counted, threads: int) -> None:
        self._store = store
        self._all_read = threading.Barrier(threads)
        self._own = threading.local()

    def check(self, keys: list[str]) -> bool:
        if not hasattr(self._own, "reads"):
            self._own.reads = True
            self._all_read.wait()
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def come(store: Counted, ranks: int, do: Callable[[Ledger, int], None]) -> None:
    """The last rank of each group comes after all others, and reads after all others have come."""
    planner = PlannedAssigner(Compose(ActivateAllRanks(), ShiftRanks())).planner
    last = [rank for rank in range(ranks) if rank % 40 == 39 or rank == ranks - 1]
    for rank in set(range(ranks)) - set(last):
        do(Ledger(store, ranks, planner), rank)
    together: Any = _Together(store, len(last))
    work = [lambda rank=rank: do(Ledger(together, ranks, planner), rank) for rank in last]
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_few_ranks_read_what_all_groups_have_counted() -> None:
    ranks, groups, forties = 16_384, 410, 11
    # Each in two operations; those that agree read a few further keys.
    most = 2 * (40 * groups + groups * forties) + 10 * forties
    store = Counted()
    come(store, ranks, lambda one, rank: one.arrive(INITIAL, Arrival(rank, rank, ranks), NOBODY))
    assert 0 < store.keys_read < most
    assert Ledger(store, ranks).wait_for_agreement(INITIAL, 0, SOON)[0].gone == NOBODY
    store.keys_read = 0

    def complete(one: Ledger, rank: int) -> None:
        one.record_completion(0, rank, ranks, Fault.of_early_return(rank, rank, 0))

    come(store, ranks, complete)
    assert 0 < store.keys_read < most
    assert Ledger(store, ranks).wait_for_outcome(0, SOON) == ("completed", None)


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


def test_the_rank_that_hung_keeps_its_stack_though_many_that_waited_for_it_were_first() -> None:
    ledger = Ledger(dist.HashStore(), 200)
    waits = Fault(FaultKind.SOFT_TIMEOUT, 0, 0, 0, time.time(), "silent", TRACEBACK)
    for rank in range(10, 60):
        ledger.record_fault(0, replace(waits, initial_rank=rank, rank=rank, due_to_peer=True))
    ledger.record_fault(0, replace(waits, initial_rank=5, rank=5))
    cause = find_cause(all_arrive(ledger, 200, NOBODY).faults)
    assert (cause.initial_rank, cause.traceback) == (5, TRACEBACK)


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
