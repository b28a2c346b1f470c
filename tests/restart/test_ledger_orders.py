"""The barrier under every order of its operations, and of deaths in between.

Ranks and reporters are threads that stop before each operation on the store; which one goes on is
hypothesis' choice, and so is where one dies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.restart._assignment.planning import PlannedAssigner
from ncclops.restart._store import arrival_bitmap
from ncclops.restart._store.client import Connection, Patience, StorePath
from ncclops.restart.agreement import INITIAL, Arrival
from ncclops.restart.attribution import Fault, FaultKind
from ncclops.restart.compose import Compose
from ncclops.restart.ledger import Ledger
from ncclops.restart.rank_assignment import ActivateAllRanks, ShiftRanks

pytestmark = pytest.mark.slow  # hundreds of orders: takes seconds

RANKS = 5
SOON = timedelta(seconds=20)
NOBODY: frozenset[int] = frozenset()


@pytest.fixture(autouse=True, scope="module")
def _small_groups() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrival_bitmap, "RANKS_PER_KEY", 2)
        patch.setattr(arrival_bitmap, "LOSS", 1 << 2)
        patch.setattr(arrival_bitmap, "GROUPS_TOGETHER", 2)
        yield


class Died(BaseException):
    """Ends a thread in the middle of its work."""


class Actor:
    """A thread that does one operation on the store on command."""

    def __init__(self, store: Any, work: Callable[[Any], None]) -> None:
        self._store, self._work = store, work
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._dies = self.done = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._stopped.acquire()

    def step(self) -> None:
        """One more operation, and on to the next."""
        self._go.release()
        self._stopped.acquire()

    def die(self) -> None:
        """Never do another operation."""
        self._dies = True
        self.step()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)
        if name in ("has_extended_api", "set_timeout", "timeout"):
            return operation

        def paused(*args: Any) -> Any:
            self._stopped.release()
            self._go.acquire()
            if self._dies:
                raise Died
            return operation(*args)

        return paused

    def _run(self) -> None:
        try:
            self._work(self)
        except Died:
            pass
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        self.done = True
        self._stopped.release()


def fault(initial_rank: int, iteration: int) -> Fault:
    return Fault(FaultKind.DIED, initial_rank, None, iteration, time.time(), "x", gone=True)


def ledger(store: Any) -> Ledger:
    planner = PlannedAssigner(Compose(ActivateAllRanks(), ShiftRanks())).planner
    return Ledger(store, RANKS, planner)


class Interrupted:
    """A store whose connection breaks at one addition: before, during or after it.

    ``late`` collects an addition that is carried out later, as one that was still on its way.
    """

    def __init__(self, store: Any, how: str, late: list[tuple[str, int]]) -> None:
        self._store, self._how, self._late = store, how, late

    def add(self, key: str, amount: int) -> int:
        if self._how and amount:
            how, self._how = self._how, ""
            if how == "done":
                self._store.add(key, amount)
            elif how == "on its way":
                self._late.append((key, amount))
            raise dist.DistNetworkError("Connection reset by peer")
        return int(self._store.add(key, amount))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def interrupted_ledger(store: Any, how: str, late: list[tuple[str, int]]) -> Ledger:
    planner = PlannedAssigner(Compose(ActivateAllRanks(), ShiftRanks())).planner
    path = StorePath(lambda: Connection(store), Patience())
    return Ledger(path.client(Connection(Interrupted(store, how, late))), RANKS, planner)


class Barrier:
    """One barrier of a job: its actors, and what they have to come to."""

    def __init__(self, store: Any, iteration: int, gone: frozenset[int]) -> None:
        self.store, self.iteration, self.gone = store, iteration, gone
        self.running: list[Actor] = []

    def arrive(self, rank: int) -> Actor:
        def work(store: Any) -> None:
            ledger(store).arrive(self.iteration, Arrival(rank, rank, RANKS), self.gone)

        return self.start(work)

    def arrive_interrupted(self, rank: int, how: str, late: list[tuple[str, int]]) -> Actor:
        def work(store: Any) -> None:
            arrival = Arrival(rank, rank, RANKS)
            interrupted_ledger(store, how, late).arrive(self.iteration, arrival, self.gone)

        return self.start(work)

    def report(self, rank: int) -> Actor:
        def work(store: Any) -> None:
            ledger(store).record_gone(self.iteration, fault(rank, self.iteration), self.gone)

        return self.start(work)

    def recount(self) -> Actor:
        def work(store: Any) -> None:
            ledger(store).count_losses(self.iteration, self.gone)

        return self.start(work)

    def start(self, work: Callable[[Any], None]) -> Actor:
        self.running.append(Actor(self.store, work))
        return self.running[-1]

    def run(self, data: st.DataObject, until: Callable[[], bool] = lambda: False) -> None:
        """Operation by operation, in any order, until all are through."""
        while not until():
            self.running = [actor for actor in self.running if not actor.done]
            if not self.running:
                return
            actor = data.draw(st.sampled_from(self.running))
            actor.step()
            if actor.error is not None:
                raise actor.error

    @property
    def agreed(self) -> bool:
        return bool(self.store.check([f"{self.iteration}/placements/0"]))


def plain_barrier(store: Any, iteration: int, gone: frozenset[int]) -> None:
    for rank in set(range(RANKS)) - gone:
        ledger(store).arrive(iteration, Arrival(rank, rank, RANKS), gone)


@settings(max_examples=40)
@given(st.data())
def test_arrivals_and_deaths_at_any_point_end_in_an_agreement(data: st.DataObject) -> None:
    store = dist.HashStore()
    plain_barrier(store, INITIAL, NOBODY)
    barrier = Barrier(store, 0, NOBODY)
    doomed = data.draw(st.sets(st.integers(0, RANKS - 1), max_size=RANKS - 1), label="doomed")
    ranks = {rank: barrier.arrive(rank) for rank in range(RANKS)}
    deaths = {rank: data.draw(st.integers(0, 12), label="dies after") for rank in doomed}
    steps = 0
    while doomed:
        due = {rank for rank in doomed if deaths[rank] <= steps}
        for rank in due:
            if not ranks[rank].done:
                ranks[rank].die()
            for _ in range(data.draw(st.integers(1, 2), label="reports")):
                barrier.report(rank)
        doomed -= due
        barrier.run(data, until=iter([False, True]).__next__)
        steps += 1
    barrier.run(data)
    assert barrier.agreed
    agreement, placement = ledger(store).wait_for_agreement(0, RANKS - 1, SOON)
    assert agreement.gone <= deaths.keys()
    assert (placement is None) == (RANKS - 1 in agreement.gone)


def test_a_loss_that_two_count_at_once_hides_no_rank_that_comes_later() -> None:
    """Neither from its own group, nor from those that look at it before it comes."""
    store = dist.HashStore()
    plain_barrier(store, INITIAL, NOBODY)
    ledger(store).record_gone(0, fault(0, 0), NOBODY)
    store.add("0/arrived/0", arrival_bitmap.LOSS)  # as by another reporter of the same loss
    barrier = Barrier(store, 0, NOBODY)
    for rank in (2, 3, 4, 1):
        assert not barrier.agreed
        ledger(store).arrive(0, Arrival(rank, rank, RANKS), NOBODY)
    assert barrier.agreed


def test_a_rank_that_was_reported_and_then_dies_on_its_way_holds_up_no_other() -> None:
    """It sees that all near it have come, as does the last of them; the report came before that."""
    store = dist.HashStore()
    plain_barrier(store, INITIAL, NOBODY)
    barrier = Barrier(store, 0, NOBODY)
    for rank in (4, 0, 2):
        ledger(store).arrive(0, Arrival(rank, rank, RANKS), NOBODY)
    reported, last = barrier.arrive(1), barrier.arrive(3)
    reported.step()
    ledger(store).record_gone(0, fault(1, 0), NOBODY)
    last.step()
    for _ in range(3):
        reported.step()
    reported.die()
    assert not barrier.agreed
    while not last.done:
        last.step()
    assert barrier.agreed


@settings(max_examples=30)
@given(st.data())
def test_an_arrival_whose_connection_breaks_counts_once(data: st.DataObject) -> None:
    """Whether its addition was carried out or not, or is later; with a loss in the same group."""
    store = dist.HashStore()
    plain_barrier(store, INITIAL, NOBODY)
    barrier, late = Barrier(store, 0, NOBODY), list[tuple[str, int]]()
    how = st.sampled_from(["", "not done", "done", "on its way"])
    lost = data.draw(st.sets(st.integers(0, RANKS - 1), max_size=2), label="lost")
    for rank in range(RANKS):
        if rank in lost:
            barrier.report(rank)
        else:
            barrier.arrive_interrupted(rank, data.draw(how, label="breaks"), late)
    barrier.run(data, until=lambda: bool(late) and data.draw(st.booleans()))
    for addition in late:
        store.add(*addition)
    barrier.run(data)
    assert barrier.agreed
    assert ledger(store).wait_for_agreement(0, 0, SOON)[0].gone == lost


@settings(max_examples=40)
@given(st.data())
def test_completions_whose_connection_breaks_decide_the_outcome_together(
    data: st.DataObject,
) -> None:
    """Not before all have come back, and with the last one."""
    store = dist.HashStore()
    late: list[tuple[str, int]] = []
    how = st.sampled_from(["", "not done", "done", "on its way"])
    order = data.draw(st.permutations(range(RANKS)))
    for number, rank in enumerate(order, 1):
        one = interrupted_ledger(store, data.draw(how, label="breaks"), late)
        one.record_completion(0, rank, RANKS, Fault.of_early_return(rank, rank, 0))
        if data.draw(st.booleans()):
            while late:
                store.add(*late.pop())
        assert store.check(["0/outcome"]) == (number == RANKS)


@settings(max_examples=80)
@given(st.data())
def test_a_report_that_is_late_for_a_barrier_counts_in_the_next(data: st.DataObject) -> None:
    """Also if the reporter dies in between: then the report of its death makes it good."""
    store = dist.HashStore()
    plain_barrier(store, INITIAL, NOBODY)
    plain_barrier(store, 0, NOBODY)
    late = Barrier(store, 0, NOBODY)
    lost, reporter, witness = 1, data.draw(st.integers(2, 3), label="reporter"), 4
    late.report(lost)
    barrier = Barrier(store, 1, NOBODY)
    barrier.running = late.running
    for rank in set(range(RANKS)) - {lost, reporter}:
        barrier.arrive(rank)
    if data.draw(st.booleans(), label="the reporter dies"):
        while not late.running[0].done:
            late.running[0].step()
        barrier.running = barrier.running[1:]
        barrier.report(reporter)
    else:
        barrier.arrive(reporter)
        barrier.run(data, until=lambda: late.running[0].done)
        barrier.recount()
    assert witness not in (lost, reporter)
    barrier.run(data)
    assert barrier.agreed
    assert lost in ledger(store).wait_for_agreement(1, witness, SOON)[0].gone
