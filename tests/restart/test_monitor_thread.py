"""The monitor thread says when the abort of an iteration begins and ends, however it ends."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from ncclops.restart import monitor_thread
from ncclops.restart._instant import Instant
from ncclops.restart._interrupt.main_thread import Interrupter
from ncclops.restart.abort import Abort
from ncclops.restart.agreement import Arrival
from ncclops.restart.attribution import Fault, FaultKind
from ncclops.restart.ledger import Ledger
from ncclops.restart.monitor_thread import Aborted, MonitorThread
from ncclops.restart.state import FrozenState, Mode

SOON = timedelta(seconds=20)
STATE = FrozenState(0, 1, 0, 1, 0, 1, 3, Mode.ACTIVE, None)
RAISED = Fault(
    kind=FaultKind.EXCEPTION,
    initial_rank=0,
    rank=0,
    iteration=3,
    at=time.time(),
    instant=Instant.now(),
    summary="rank 0: ValueError",
)


class Fails(Abort):
    """Raises ``error``, if there is one."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __call__(self, state: FrozenState) -> FrozenState:
        if self.error is not None:
            raise self.error
        return state


@pytest.mark.parametrize("error", [None, RuntimeError("no buffers to destroy")])
def test_an_abort_that_raises_has_ended_as_well(error: Exception | None) -> None:
    """Otherwise it counts as under way until the hard timeout, which then ends the rank."""
    store, noted = HashStore(), list[tuple[int, bool]]()

    thread = MonitorThread(
        Ledger(store, 1),
        Interrupter(threading.get_ident(), 0.01, 1),  # the main thread is not in the function
        Fails(error),
        initial_rank=0,
        last_call_wait=timedelta(0),
        agreement_timeout=SOON,
        abort_timeout=SOON,
        wake=None,
        unblock=lambda _: None,
        before_interrupting=lambda: None,
        own_silence=lambda _: None,
        note_abort=lambda iteration, under_way: noted.append((iteration, under_way)),
    )
    Ledger(store, 1).record_fault(3, RAISED)
    thread.watch(3, STATE)
    assert isinstance(thread.messages.get(timeout=20), Aborted)
    assert noted == [(3, True), (3, False)]
    # It waits for an agreement, and in the store: a thread that Python's end finds there aborts it.
    Ledger(store, 1).arrive(3, Arrival(0, 0, 1), [])
    thread.stop(20)
    assert "ncclops-monitor" not in {each.name for each in threading.enumerate()}


@pytest.mark.parametrize("name", ["ncclops-abort", "saves"])
def test_the_recorder_is_read_before_an_abort_only_where_a_thread_may_have_to_end(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It copies all its entries: some MB, of which each thread that has asked keeps as many."""
    asked, ended = list[bool](), list[type[BaseException]]()

    def pending() -> bool:
        asked.append(True)
        return True

    monkeypatch.setattr(monitor_thread, "may_have_pending_operation", pending)
    monkeypatch.setattr(monitor_thread, "end_threads_at_work", ended.append)
    there = [threading.main_thread(), threading.Thread(name=name)]
    monkeypatch.setattr(threading, "enumerate", lambda: there)
    in_monitor: Any = SimpleNamespace(_interrupter=SimpleNamespace(raise_ahead=lambda: None))
    MonitorThread._leave_ahead(in_monitor)
    assert [bool(asked), bool(ended)] == [name == "saves"] * 2
