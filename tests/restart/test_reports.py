"""A report finds a main process that records it, even if others in the ring do not answer."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from pathlib import Path
from typing import Any, cast

from ncclops.restart._kept_descriptors import KeptDescriptors
from ncclops.restart._monitor.client import Reporter
from ncclops.restart._monitor.link import Message, Peer
from ncclops.restart._monitor.reports import CONFIRM_WITHIN_S, Reports
from ncclops.restart.ledger import Ledger

DIED: Message = {"op": "report", "id": "r1"}
CONFIRMED: Message = {"op": "confirm", "id": "r1"}


class Neighbour:
    """In the place of a connection to another monitor process."""

    def __init__(self) -> None:
        self.got: list[Message] = []

    def send(self, message: Message) -> None:
        self.got.append(message)


class Monitor:
    """The reports of one monitor process; its main process is dead where ``main`` is None."""

    def __init__(self, *, main: bool = True, successor: bool = True) -> None:
        self.main: list[Message] = []
        self.next, self.before = Neighbour(), Neighbour()
        self.has_successor = successor
        self.reports = Reports(
            self._take if main else lambda _: False,
            lambda: cast(Peer, self.next) if self.has_successor else None,
        )
        self.reports.main_is_gone = not main

    def _take(self, message: Message) -> bool:
        self.main.append(message)
        return True

    def deliver(self, source: Any = None, now: float = 0.0) -> None:
        self.reports.deliver(DIED, cast(Peer | None, source), now)


def test_the_own_main_process_comes_first() -> None:
    monitor = Monitor()
    monitor.deliver()
    assert (monitor.main, monitor.next.got) == ([DIED], [])
    monitor.reports.confirm(CONFIRMED)
    assert monitor.reports.are_done


def test_one_that_does_not_confirm_in_time_is_passed_over() -> None:
    monitor = Monitor()
    monitor.deliver()
    monitor.reports.retry(CONFIRM_WITHIN_S / 2)
    assert monitor.next.got == []
    monitor.reports.retry(CONFIRM_WITHIN_S)
    assert monitor.next.got == [DIED]


def test_a_suspicion_that_was_withdrawn_is_passed_on_no_more() -> None:
    monitor = Monitor()
    monitor.deliver()
    for rank in (1, 2):
        suspicion = {"op": "report", "id": f"s{rank}", "rank": rank, "patience_s": 5.0}
        monitor.reports.deliver(suspicion, None, 0.0)
    monitor.reports.withdraw(1)
    monitor.reports.retry(CONFIRM_WITHIN_S)
    assert [each["id"] for each in monitor.next.got] == ["r1", "s2"]


def test_one_that_is_dead_is_passed_over_at_once() -> None:
    monitor = Monitor(main=False)
    monitor.deliver()
    assert monitor.next.got == [DIED]


def test_the_confirmation_goes_back_the_way_that_the_report_came() -> None:
    monitor = Monitor(main=False)
    monitor.deliver(monitor.before)
    monitor.reports.confirm(CONFIRMED)
    assert monitor.before.got == [CONFIRMED]


def test_a_report_that_comes_again_after_its_confirmation_is_confirmed_and_not_passed_on() -> None:
    monitor = Monitor()
    monitor.reports.confirm(CONFIRMED)
    monitor.deliver(monitor.before)
    assert (monitor.before.got, monitor.main, monitor.next.got) == ([CONFIRMED], [], [])


def test_an_own_report_that_went_round_the_ring_is_done_when_no_main_process_is_left() -> None:
    """Each on the way has received it; one that merely hangs finds it when it goes on."""
    monitor = Monitor(main=False)
    monitor.deliver()
    monitor.deliver(monitor.before)
    assert monitor.before.got == [CONFIRMED]
    assert monitor.reports.are_done


def test_without_a_successor_it_waits_for_one() -> None:
    monitor = Monitor(main=False, successor=False)
    monitor.deliver()
    monitor.reports.retry(5.0)
    assert monitor.next.got == []
    monitor.has_successor = True
    monitor.reports.on_successor(5.0)
    assert monitor.next.got == [DIED]


def test_a_report_that_no_process_confirms_is_given_up() -> None:
    monitor = Monitor(main=False)
    monitor.deliver()
    monitor.reports.retry(59.0)
    assert not monitor.reports.are_done
    monitor.reports.retry(60.0)
    assert monitor.reports.are_done


def test_reports_of_many_threads_at_once_are_recorded_by_one_thread_each_once() -> None:
    reporter = Reporter(lambda: cast(Ledger, None))
    recorded: list[tuple[int, int]] = []

    def submit(number: int) -> None:
        ready.wait()
        reporter.submit(lambda _: recorded.append((number, threading.get_ident())))

    ready = threading.Barrier(20)
    threads = [threading.Thread(target=submit, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reporter.stop(60)
    assert sorted(number for number, _ in recorded) == list(range(20))
    assert len({thread for _, thread in recorded}) == 1


def test_the_first_report_has_its_connection_when_all_other_descriptors_are_used_up() -> None:
    recorded: list[int] = []
    opened: list[int] = []

    def connect() -> Ledger:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        return cast(Ledger, None)

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    reporter = Reporter(connect)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened_at_most(), before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        reporter.submit(lambda _: recorded.append(1))
        reporter.stop(60)
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert recorded == [1]


def opened_at_most() -> int:
    """A limit that leaves a few descriptors to this process."""
    return max(int(name) for name in os.listdir("/proc/self/fd")) + 8  # noqa: PTH208


def test_a_kept_descriptor_that_the_script_has_put_to_use_is_not_closed(tmp_path: Path) -> None:
    kept = KeptDescriptors()
    with (tmp_path / "own").open("w") as own:
        number = next(iter(kept._inodes))
        os.dup2(own.fileno(), number)  # as after closerange()
        kept.give()
        os.write(number, b"still open")
        os.close(number)
    assert (tmp_path / "own").read_text() == "still open"
