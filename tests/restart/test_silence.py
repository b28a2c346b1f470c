"""What a rank says of itself that has not come to what others wait for, though it is not silent."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from ncclops import flight_recorders
from ncclops.restart import session
from ncclops.restart._endings import follows_from_abort
from ncclops.restart._groups import recorder
from ncclops.restart._groups.recorder import begun_operations
from ncclops.restart._monitor.link import Page, Watch, create_page_fd
from ncclops.restart._silence import LastOperation, own_silence
from ncclops.restart.agreement import Arrival
from ncclops.restart.attribution import (
    ExceededTimeout,
    Fault,
    FaultKind,
    find_cause,
    with_hidden_cause,
)
from ncclops.restart.ledger import FAULT, Ledger

BEGUN = [["default_pg"], ("0", 5)]
RECORDS_GLOO = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"),
    reason="this torch records nothing of Gloo",
)
# How the recorder is, and whether the rank has made groups in this iteration.
KNOWN: dict[str, tuple[list[object], bool]] = {
    "no group yet": ([], False),
    "a group that is not used": ([["default_pg"]], True),
}


@pytest.fixture
def main_thread() -> Iterator[int]:
    """A thread that is in its own code."""
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, args=(60,))
    thread.start()
    yield thread.ident or 0
    ends.set()
    thread.join()


def said(begun: list[object], main_thread: int, soft_s: float, *, had_groups: bool) -> Fault | None:
    """It runs Python, and its groups have been idle for more than half of ``soft_s``."""
    page, last = Page(create_page_fd()), LastOperation()
    page.soft_s, page.watch, page.main_beat = soft_s, Watch.SOFT_AND_HARD, Page.now() + 60
    last.look(begun)
    return own_silence(page, main_thread, 1, last, had_groups=had_groups)


@pytest.fixture
def has_groups() -> Iterator[None]:
    """The default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("known", KNOWN)
def test_a_rank_that_did_something_else_says_so(
    request: pytest.FixtureRequest, known: str, main_thread: int
) -> None:
    """Those that waited for it were blamed: for an evaluation, an import in a new process."""
    begun, had_groups = KNOWN[known]
    if had_groups:
        request.getfixturevalue("has_groups")
    fault = said(begun, main_thread, 1e-9, had_groups=had_groups)
    assert fault is not None
    assert (fault.kind, fault.timeout, fault.lacks_a_peer) == (FaultKind.SOFT_TIMEOUT, None, False)
    assert "call.phase()" in fault.summary


@pytest.mark.usefixtures("has_groups")
@pytest.mark.parametrize(
    ("begun", "soft_s"), [([], 1e-9), (BEGUN, 600.0)], ids=["recorder off", "an operation just now"]
)
def test_it_says_nothing_where_others_cannot_have_waited_for_it(
    begun: list[object], soft_s: float, main_thread: int
) -> None:
    assert said(begun, main_thread, soft_s, had_groups=True) is None


@RECORDS_GLOO
@pytest.mark.usefixtures("has_groups")
def test_an_operation_that_a_rank_begins_is_seen() -> None:
    before = begun_operations()
    dist.all_reduce(torch.ones(1))
    assert before != begun_operations() == begun_operations()


@pytest.mark.parametrize("used", flight_recorders.ALL)
def test_what_is_remembered_of_operations_does_not_grow_with_the_groups_of_the_process(
    monkeypatch: pytest.MonkeyPatch, used: str
) -> None:
    """The recorder keeps the counts of each group that there has ever been."""

    def begun_in(groups: dict[str, int]) -> list[Any]:
        counts = {group: {"last_enqueued_collective": count} for group, count in groups.items()}
        found = {"pg_config": {"0": {}}, "pg_status": counts}
        monkeypatch.setattr(recorder, "recorded", lambda name: found if name == used else {})
        return begun_operations()

    many = {str(n): 2 for n in range(1000)}
    assert len(begun_in(many)) == len(begun_in({"0": 2}))
    assert begun_in(many) == begun_in(many)
    assert begun_in(many) != begun_in(many | {"999": 3})
    assert begun_in(many) != begun_in(many | {"1000": -1})
    assert begun_in({}) != begun_in({"0": -1})


@pytest.mark.parametrize(
    ("idle_s", "begun", "asks", "has_fault"),
    [(0.0, [], False, False), (400.0, ["more"], True, False), (400.0, [], True, True)],
    ids=["an operation just now", "one since the last tick", "none for long"],
)
def test_the_recorder_is_read_only_where_its_answer_matters(
    monkeypatch: pytest.MonkeyPatch,
    main_thread: int,
    idle_s: float,
    begun: list[str],
    asks: bool,
    has_fault: bool,
) -> None:
    """It takes the longer, and the more memory, the more groups there have been."""
    page, last, asked = Page(create_page_fd()), LastOperation(), list[int]()
    page.soft_s, page.watch, page.main_beat = 600.0, Watch.SOFT_AND_HARD, Page.now() + 60
    last.look(BEGUN)
    last._at -= idle_s

    def now_begun() -> list[Any]:
        asked.append(1)
        return [*BEGUN, *begun]

    monkeypatch.setattr(session, "begun_operations", now_begun)
    of_session: Any = SimpleNamespace(
        monitor_process=SimpleNamespace(page=page),
        _main_thread=main_thread,
        _rank=1,
        _last_operation=last,
        _groups_made_in=-1,
        iteration=0,
    )
    fault = session.Session._own_silence(of_session, None)
    assert (fault is not None, bool(asked)) == (has_fault, asks)


@pytest.mark.parametrize("also_silent", [False, True])
def test_it_is_the_cause_where_none_was_silent_but_those_that_waited(also_silent: bool) -> None:
    ledger = Ledger(dist.HashStore(), 3)
    exceeded = ExceededTimeout("soft", 4.0, 4.2, "main-thread")

    def silent(rank: int, *, timeout: ExceededTimeout | None, due_to_peer: bool = False) -> Fault:
        fields = {"kind": FaultKind.SOFT_TIMEOUT, "initial_rank": rank, "rank": rank}
        given = {"iteration": 0, "at": 0.0, "summary": f"rank {rank}", "timeout": timeout}
        return Fault(**fields, **given, due_to_peer=due_to_peer)  # type: ignore[arg-type]

    ledger.record_fault(0, silent(0, timeout=exceeded, due_to_peer=True))
    ledger.note_silent(0, silent(1, timeout=None))
    if also_silent:
        ledger.note_silent(0, silent(2, timeout=exceeded))
    for rank in range(3):
        ledger.arrive(0, Arrival(rank, rank, 3), frozenset())
    faults = ledger.whole_agreement(0)
    assert faults is not None
    assert faults.faults[0].initial_rank == (2 if also_silent else 1)


@pytest.fixture
def pending(starts_processes: None) -> Iterator[None]:
    """An operation of Gloo's that the other rank, of this process as well, has not begun."""
    store, before = dist.HashStore(), recorder.recorded_of_gloo().keys()

    def join(rank: int) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(store, rank, 2, options)

    with ThreadPoolExecutor(2) as both:
        first, second = both.map(join, range(2))
    for work in [each.allreduce([torch.ones(1)]) for each in (first, second)]:
        work.wait()
    while any(  # its end is recorded a moment later
        status["last_completed_collective"] != status["last_enqueued_collective"]
        for number, status in recorder.recorded_of_gloo().items()
        if number not in before
    ):
        time.sleep(0.001)
    waiting = first.allreduce([torch.ones(1)])
    yield
    second.allreduce([torch.ones(1)]).wait()
    waiting.wait()


@RECORDS_GLOO
@pytest.mark.usefixtures("starts_processes")  # it waits a moment for Gloo's threads
def test_an_operation_of_gloo_is_pending_until_all_have_begun_it_or_its_group_has_ended(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_newest_ended", -1)
    monkeypatch.setattr(recorder, "_pending_in_ended", {})
    recorder.forget_ended()  # what other tests have left
    assert not recorder.has_pending_operation()
    request.getfixturevalue("pending")
    assert recorder.has_pending_operation()
    recorder.forget_ended()
    assert not recorder.has_pending_operation()


IN_STORE = (
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
    "store by key '0', but store->get('0') got error: Failed to recv, got 0 bytes. Connection was "
    "likely closed. Did the remote server shutdown or crash?"
)
CLEAN_UPS: dict[str, str] = {
    "finally": "try:\n raise ValueError('own')\nfinally:\n wait()",
    "except": "try:\n raise ValueError('own')\nexcept ValueError:\n wait()\n raise",
    "of a generator": "def steps():\n try:\n  raise ValueError('own')\n  yield\n finally:\n"
    "  wait()\nlist(steps())",
}
NONE_OF_ITS_OWN: dict[str, str] = {
    "nothing raised": "wait()",
    "dealt with": "try:\n raise ValueError('own')\nexcept ValueError:\n wait()",
    "of a peer": "try:\n raise RuntimeError('Connection closed by peer')\nfinally:\n wait()",
    "it leaves": "try:\n raise SystemExit\nfinally:\n wait()",
}


@RECORDS_GLOO
@pytest.mark.usefixtures("pending")
@pytest.mark.parametrize("place", [*CLEAN_UPS, *NONE_OF_ITS_OWN])
def test_a_rank_whose_clean_up_waits_for_others_tells_what_it_has_raised(
    place: str, tmp_path: Path
) -> None:
    """All ranks wait then, and another one was named."""
    program = tmp_path / "cleaning_up.py"
    program.write_text({**CLEAN_UPS, **NONE_OF_ITS_OWN}[place])
    waits, ends = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        ends.wait(60)

    def run() -> None:
        with contextlib.suppress(BaseException):
            exec(compile(program.read_text(), program, "exec"), {"wait": wait})

    thread = threading.Thread(target=run)
    thread.start()
    assert waits.wait(60)
    page, last = Page(create_page_fd()), LastOperation()
    page.soft_s, page.watch = 1e-9, Watch.SOFT_AND_HARD
    fault = own_silence(page, thread.ident or 0, 1, last, had_groups=False)
    ends.set()
    thread.join()
    if place in NONE_OF_ITS_OWN:
        assert fault is None
        return
    assert fault is not None
    assert (fault.kind, fault.initial_rank) == (FaultKind.EXCEPTION, 1)
    assert fault.summary == "ValueError: own, and its clean-up waited for other ranks"


@pytest.mark.parametrize("ends_with", [None, "boom", IN_STORE])
@pytest.mark.parametrize("named", [0, 1])
@pytest.mark.parametrize("kind", [FaultKind.SOFT_TIMEOUT, FaultKind.HUNG])
def test_a_clean_up_that_waited_explains_that_ranks_hang(
    kind: FaultKind, named: int, ends_with: str | None
) -> None:
    """Where all wait, an observer of all ranks, and a timeout, name any of them. What the clean-up
    ends with came after the abort."""
    hang = Fault.observed(kind, named, 0, "all ranks wait")
    faults = [dataclasses.replace(hang, due_to_peer=kind is FaultKind.SOFT_TIMEOUT)]
    of_rank = {"kind": FaultKind.EXCEPTION, "initial_rank": 1, "rank": 1, "iteration": 0}
    raised = Fault.of_exception(ValueError("own"), **of_rank)  # type: ignore[arg-type]
    if ends_with is not None:
        ended = RuntimeError(ends_with)
        faults.append(Fault.of_exception(ended, secondary=True, **of_rank))  # type: ignore[arg-type]
    assert find_cause(with_hidden_cause(faults, raised)) is raised
    assert with_hidden_cause(faults, None) == faults


def test_a_connection_to_the_store_that_was_shut_down_is_no_fault_of_the_rank() -> None:
    """As a rank's is, to end its wait there; torch names another type than where it is lost."""
    assert follows_from_abort(RuntimeError(IN_STORE))


MONITORED = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 3000 ms"
IN_GLOO = "[../third_party/gloo] Timed out waiting 3000ms for recv operation to complete"


@pytest.mark.parametrize("text", [MONITORED, IN_GLOO])
def test_who_was_late_is_the_cause_where_the_others_have_a_shorter_timeout(
    text: str, main_thread: int
) -> None:
    """That of a barrier or a group: the rank that it was raised on was blamed."""
    ledger = Ledger(dist.HashStore(), 2)
    raised = Fault.of_exception(
        RuntimeError(text), FaultKind.EXCEPTION, initial_rank=0, rank=0, iteration=0
    )
    ledger.record_fault(0, raised)
    told, waited_s = ledger.wait_for_outcome(0, timedelta(seconds=5))
    assert (told, waited_s) == (FAULT, 3.0)
    page, last = Page(create_page_fd()), LastOperation()
    page.soft_s, page.watch, page.main_beat = 600.0, Watch.SOFT_AND_HARD, Page.now() + 60
    assert own_silence(page, main_thread, 1, last, waited_s, had_groups=False) is None
    late = own_silence(page, main_thread, 1, last, 1e-9, had_groups=False)
    assert late is not None
    assert "call.phase()" not in late.summary, "the timeout is not one of ours"
    ledger.note_silent(0, late)
    for rank in (0, 1):
        ledger.arrive(0, Arrival(rank, rank, 2, ()), ())
    agreement, _ = ledger.wait_for_agreement(0, 0, timedelta(seconds=5))
    assert find_cause(agreement.faults).initial_rank == 1
