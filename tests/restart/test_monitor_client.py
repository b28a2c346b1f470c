"""What a monitor process reports ends up in the iteration that waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from ncclops.restart._instant import Instant
from ncclops.restart._monitor import client as monitor_client
from ncclops.restart._monitor.client import MonitorClient
from ncclops.restart.agreement import Agreement, Arrival
from ncclops.restart.attribution import Fault, FaultKind
from ncclops.restart.ledger import Ledger
from ncclops.restart.monitor_process import MonitorProcess, MonitorProcessSettings

SOON = timedelta(seconds=20)
NOBODY: frozenset[int] = frozenset()
DIED = Fault(
    kind=FaultKind.DIED,
    initial_rank=1,
    rank=1,
    iteration=0,
    at=time.time(),
    instant=Instant.now(),
    summary="rank 1: the process died",
    gone=True,
)


@contextmanager
def client(store: HashStore, ledger: Ledger | None = None) -> Iterator[MonitorClient]:
    """Rank 0's, of two; its monitor process is not started."""
    monitor = MonitorProcess(
        MonitorProcessSettings(0, "127.0.0.1", SOON, SOON, SOON, SOON, SOON, None, None, None, None)
    )
    made = MonitorClient(
        0,
        2,
        threading.get_ident(),
        monitor,
        lambda: ledger or Ledger(store, 2),
        look_again=lambda _: None,
        fault_seen_in=lambda: None,
    )
    try:
        yield made
    finally:
        made.stop(SOON.total_seconds())
        monitor.stop()


class BeginsMeanwhile(Ledger):
    """The main thread begins iteration 1 while the reporter's thread is at ``step``."""

    step = ""
    begin = staticmethod(lambda: None)

    def _at(self, step: str) -> None:
        if step == self.step:
            self.step = ""
            self.begin()

    def record_fault(self, iteration: int, fault: Fault) -> None:
        self._at("before")
        super().record_fault(iteration, fault)
        self._at("recorded")

    def count_losses(self, iteration: int, gone_before: Collection[int]) -> None:
        self._at("in the log")
        super().count_losses(iteration, gone_before)
        self._at("counted")


@pytest.mark.parametrize("step", ["before", "recorded", "in the log", "counted"])
def test_a_loss_is_counted_in_an_iteration_that_begins_while_it_is_recorded(step: str) -> None:
    store = HashStore()
    none = Agreement(0, NOBODY, NOBODY, NOBODY, (), ())
    with client(store) as reports:
        others = Ledger(store, 2)
        reports.begin(0, none, others)

        ledger = BeginsMeanwhile(store, 2)
        ledger.step = step
        ledger.begin = lambda: reports.begin(1, none, others)
        reports.record_gone(ledger, DIED)

        others.arrive(1, Arrival(0, 0, 2), NOBODY)
        agreement, _ = others.wait_for_agreement(1, 0, SOON)
        assert agreement.lost == {1}


@pytest.mark.parametrize("what", ["nothing", "heard again", "neighbour lost"])
def test_a_suspicion_ends_when_the_neighbour_hears_the_rank_again_or_is_lost_itself(
    what: str,
) -> None:
    """That rank says nothing in the store: its own monitor process misses nobody."""
    store = HashStore()
    suspicion = {"cause": "lost", "detail": "no heartbeat for 1.5 s", "rank": 1, "gone": True}
    stamp = {"at": DIED.at, "instant": list(Instant.now()), "id": 1, "by": 0, "patience_s": 0.2}
    with client(store) as reports:
        others = Ledger(store, 2)
        reports.begin(0, Agreement(0, NOBODY, NOBODY, NOBODY, (), ()), others)
        reports.on_message({"op": "report", **suspicion, **stamp})
        if what == "heard again":
            reports.on_message({"op": "withdraw", "rank": 1})
        elif what == "neighbour lost":
            others.record_gone(0, replace(DIED, initial_rank=0, rank=0), NOBODY)
        judged = threading.Event()
        timer = threading.Timer(0.5, reports.submit, (lambda _: judged.set(),))
        timer.start()
        assert judged.wait(SOON.total_seconds())
        assert (1 in reports._reported) is (what == "nothing")


class FailsOnce(Ledger):
    """The store does not answer when the suspicion is judged for the first time."""

    asked = 0

    def vouches(self, initial_rank: int) -> int:
        type(self).asked += 1
        if self.asked == 2:
            raise ConnectionError("the store does not answer")
        return super().vouches(initial_rank)


def test_a_suspicion_that_could_not_be_judged_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its neighbour goes on to suspect the rank, which nobody else does."""
    monkeypatch.setattr(monitor_client, "_JUDGED_WITHIN_S", 0.0)
    monkeypatch.setattr(FailsOnce, "asked", 0)
    store = HashStore()
    suspicion = {"cause": "lost", "detail": "connect: EHOSTUNREACH", "rank": 1, "gone": True}
    stamp = {"at": DIED.at, "instant": list(Instant.now()), "by": 0, "patience_s": 0.1}
    with client(store, FailsOnce(store, 2)) as reports:
        reports.begin(0, Agreement(0, NOBODY, NOBODY, NOBODY, (), ()), Ledger(store, 2))
        until, count, pause = time.monotonic() + SOON.total_seconds(), 0, threading.Event()
        while 1 not in reports._reported and time.monotonic() < until:
            count += 1
            reports.on_message({"op": "report", "id": count, **suspicion, **stamp})
            pause.wait(0.2)
        assert FailsOnce.asked > 2 and 1 in reports._reported
