"""The main process's part in what its monitor process does: addresses, and reports recorded.

The monitor process cannot use the store. What it reports is written there by the reporter thread,
and the addresses of other monitor processes are read there for it.
"""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from traceback import format_stack
from typing import Any

from ncclops.restart._groups import kept_beside
from ncclops.restart._groups.recorder import has_pending_operation
from ncclops.restart._groups.revoking import store_in_use
from ncclops.restart._instant import Instant
from ncclops.restart._kept_descriptors import KeptDescriptors
from ncclops.restart.agreement import INITIAL, Agreement
from ncclops.restart.attribution import ExceededTimeout, Fault, FaultKind
from ncclops.restart.ledger import Ledger
from ncclops.restart.monitor_process import MonitorProcess
from ncclops.restart.waiting import waits_for_peers

log = logging.getLogger("ncclops.restart")

# How many of the following ranks a monitor process knows in advance: once its main process is dead
# it cannot ask for more.
_KNOWN_SUCCESSORS = 3

# Whether a new process is there for a rank that is suspected: then it has ended.
_LOOK_EVERY_S = 1.0
# A suspicion is judged when its time is over, by a thread that may have other reports to write.
_JUDGED_WITHIN_S = 10.0

# Some 10 ms.
_DELETED_AT_ONCE = 100

_CAUSES = {
    "died": FaultKind.DIED,
    "lost": FaultKind.LOST,
    "soft-timeout": FaultKind.SOFT_TIMEOUT,
}


class MonitorClient:
    """Of one call of a wrapped function, for the initial rank ``rank``.

    ``iteration`` is the present one (``INITIAL`` before the first), ``gone`` the initial ranks
    that had left the job when it began, ``absent`` before the first; ``main_thread`` is the
    identity of the main thread, ``fault_seen_in`` the iteration in which this rank last knew of a
    fault.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        main_thread: int,
        monitor_process: MonitorProcess,
        connect: Callable[[], Ledger],
        look_again: Callable[[int], object],
        fault_seen_in: Callable[[], int | None],
        absent: frozenset[int] = frozenset(),
    ) -> None:
        self.iteration = INITIAL
        self.gone = absent
        self._rank = rank
        self._world_size = world_size
        self._main_thread = main_thread
        self._monitor_process = monitor_process
        self._reporter = Reporter(connect)
        self._look_again = look_again
        self._fault_seen_in = fault_seen_in
        self._reported: dict[int, Fault] = {}  # losses that no agreement has taken in yet
        self._addresses: list[list[Any]] = []
        # By who suspects whom, initial ranks: until when the latter may speak up. Of the reporter
        # thread.
        self._suspicions: dict[tuple[int, int], float] = {}
        self._passed_over: set[int] = set()  # our monitor process may still try to reach them
        self._vouching = False

    def submit(self, job: Job) -> None:
        """Have the reporter thread run ``job``. Does not block; any thread."""
        self._reporter.submit(job)

    def stop(self, timeout_s: float) -> None:
        """Finish what is to be recorded, for at most ``timeout_s``."""
        self._reporter.stop(timeout_s)

    def begin(self, iteration: int, agreement: Agreement, ledger: Ledger) -> None:
        """``iteration`` begins, after ``agreement``. Main thread, whose ledger it is."""
        self.gone = agreement.gone
        self.iteration = iteration
        for rank in self._passed_over & agreement.gone:
            self._passed_over.discard(rank)
            self._monitor_process.send({"op": "forget", "rank": rank})
        # A loss that was reported too late for the agreement is a fault of the new iteration.
        for rank, fault in list(self._reported.items()):
            if rank not in agreement.gone:
                ledger.record_fault(iteration, fault)
                ledger.count_losses(iteration, agreement.gone)
            else:
                del self._reported[rank]

    def clear_up(self, iteration: int) -> None:
        """Delete what iterations before ``iteration`` have left in the store. One rank's task.

        A part at a time, so that reports need not wait for all of it.
        """

        def delete_some(ledger: Ledger, keys: list[str]) -> None:
            ledger.delete(keys[-_DELETED_AT_ONCE:])
            del keys[-_DELETED_AT_ONCE:]
            if keys:
                self._reporter.submit(lambda ledger: delete_some(ledger, keys))

        since = store_in_use(), kept_beside.in_use_since()
        self._reporter.submit(
            lambda ledger: delete_some(ledger, ledger.outdated(iteration, *since))
        )

    # --- the ring (main thread) ---------------------------------------------------------------

    def connect_ring(self, ledger: Ledger, timeout: timedelta) -> None:
        """Give our monitor process the address of its successor, once that is published."""
        if self._world_size == 1:
            self._send_addresses()
            return
        successor = (self._rank + 1) % self._world_size
        self._addresses.append(ledger.address_of(successor, timeout))
        self._send_addresses()

    def connect_ring_of(self, ledger: Ledger, gone: Collection[int]) -> None:
        """Give it the addresses of its successors: all but ``gone`` have published theirs."""
        following = (rank for rank in self._following(self._rank) if rank not in gone)
        self._addresses = ledger.known_addresses(itertools.islice(following, _KNOWN_SUCCESSORS))
        self._send_addresses()

    def add_successors(self, ledger: Ledger, gone: Iterable[int]) -> None:
        """Give it the addresses of a few more successors, now that all have published theirs."""
        lost = set(gone)
        following = (rank for rank in self._following(self._rank) if rank not in lost)
        more = ledger.known_addresses(itertools.islice(following, 1, _KNOWN_SUCCESSORS))
        self._addresses += more
        if more:  # an empty message would mean that no other rank is left
            self._send_addresses(more)

    def ask_to_look_again(self) -> None:
        """Ask all ranks, along the ring, whether they know that the iteration has ended."""
        self._monitor_process.send({"op": "look-again", "iteration": self.iteration})

    # --- faults seen in this process ----------------------------------------------------------

    def request_restart(self, reason: str, hung: int | None) -> None:
        """Record a fault of the present iteration: of this rank, or of the rank ``hung``.

        From any thread.
        """
        if hung is None:
            self._report(FaultKind.REQUESTED, self._rank, reason)
        else:
            self._report(FaultKind.HUNG, hung, reason)

    def report_nccl_error(self, error: str) -> None:
        """Record ``error`` as this rank's. From any thread."""
        self._report(FaultKind.NCCL_ERROR, self._rank, error)

    def _report(self, kind: FaultKind, rank: int, reason: str) -> None:
        iteration = self.iteration
        fault = Fault(
            kind=kind,
            initial_rank=rank,
            rank=None,
            iteration=iteration,
            at=time.time(),
            instant=Instant.now(),
            summary=reason,
        )
        if iteration != INITIAL:  # before the first, there is nothing to start again
            self._reporter.submit(lambda ledger: ledger.record_fault(iteration, fault))

    # --- messages of the monitor process ------------------------------------------------------

    def on_message(self, message: dict[str, Any]) -> None:
        """Act on ``message``; does not block. Watchdog thread."""
        if message["op"] == "need-addresses":
            self._on_need_addresses(message["after"])
        elif message["op"] == "look-again":
            self._look_again(message["iteration"])
        elif message["op"] == "vouch":
            self._on_vouch()
        elif message["op"] == "withdraw":
            self._reporter.submit(lambda _: self._withdraw(message["rank"]))
        elif "patience_s" in message:
            self._reporter.submit(lambda ledger: self._suspect(ledger, message))
        else:
            self._reporter.submit(lambda ledger: self._record(ledger, message))

    def _on_vouch(self) -> None:
        """No other monitor process asks ours: say in the store that this rank lives."""
        if self._vouching or self._world_size == 1:
            return
        self._vouching = True

        def vouch(ledger: Ledger) -> None:
            self._vouching = False
            ledger.vouch(self._rank)

        self._reporter.submit(vouch)

    def _suspect(self, ledger: Ledger, message: dict[str, Any]) -> None:
        """A rank cannot be reached by its neighbour: give it time to speak up. Reporter thread."""
        rank, by, now = message["rank"], message["by"], time.monotonic()
        # One that has not been judged in time never will be: the store failed meanwhile.
        is_known = rank in self.gone or now < self._suspicions.get((by, rank), 0) + _JUDGED_WITHIN_S
        heard = 0 if is_known else ledger.vouches(rank)
        self._monitor_process.send({"op": "confirm", "id": message["id"]})
        self._passed_over.add(rank)
        if is_known:
            return
        until = self._suspicions[by, rank] = now + message["patience_s"]

        def look_later() -> None:
            left_s = max(0.0, until - time.monotonic())
            pause_s = min(_LOOK_EVERY_S, left_s) if ledger.ranks_return else left_s
            timer = threading.Timer(pause_s, self._reporter.submit, (judge,))
            timer.daemon = True
            timer.start()

        def judge(ledger: Ledger) -> None:
            if self._suspicions.get((by, rank)) != until:
                return  # withdrawn: its neighbour hears it again
            if by in ledger.ranks_gone():
                # It was the neighbour that nobody could reach. The one before it watches ``rank``
                # now, which therefore misses nobody, and says nothing in the store.
                del self._suspicions[by, rank]
                return
            is_silent = ledger.vouches(rank) == heard
            has_ended = ledger.ranks_return and rank in ledger.generations.announced()
            if is_silent and not has_ended and time.monotonic() < until:
                look_later()
                return
            del self._suspicions[by, rank]
            if is_silent or has_ended:
                self._record(ledger, message)
            else:
                log.warning(
                    "rank %d lives, though its neighbour cannot reach it (%s): is the network "
                    "between the monitor processes open, and NCCLOPS_RESTART_HOST right?",
                    rank,
                    message["detail"],
                )

        look_later()

    def _withdraw(self, rank: int) -> None:
        """Our monitor process hears ``rank`` again. Reporter thread."""
        for pair in [pair for pair in self._suspicions if pair[1] == rank]:
            del self._suspicions[pair]

    def _record(self, ledger: Ledger, message: dict[str, Any]) -> None:
        """Write a monitor process's report to the store, and confirm it. Reporter thread."""
        iteration = self.iteration
        stack = message.get("stacks") or self._main_stack_if_silent(message)
        fault = Fault(
            kind=_CAUSES[message["cause"]],
            initial_rank=message["rank"],
            rank=message.get("number"),
            iteration=message.get("iteration", iteration),
            at=message["at"],
            instant=Instant(*message["instant"]),
            summary=f"rank {message['rank']}: {message['detail']}",
            detail=message["detail"],
            timeout=ExceededTimeout(**timeout) if (timeout := message.get("timeout")) else None,
            traceback=stack,
            gone=message["gone"],
            due_to_peer=_is_due_to_peer(message, stack),
        )
        if fault.initial_rank in self.gone:
            pass  # a rank that has left already: it is in the last agreement
        elif fault.gone:
            self.record_gone(ledger, fault)
        elif fault.iteration == iteration and not self._comes_late(fault):
            ledger.record_fault(iteration, fault)
        self._monitor_process.send({"op": "confirm", "id": message["id"]})

    def record_gone(self, ledger: Ledger, fault: Fault) -> None:
        """Record a loss, and see that an agreement takes it in. In the thread of ``ledger``."""
        self._reported[fault.initial_rank] = fault
        iteration = self.iteration  # read after the note for ``begin`` is made
        ledger.record_gone(iteration, fault, self.gone)
        while iteration != self.iteration and fault.initial_rank not in self.gone:
            # ``begin`` may have counted the losses before this one was in the log.
            iteration = self.iteration
            ledger.record_fault(iteration, fault)
            ledger.count_losses(iteration, self.gone)

    def _comes_late(self, fault: Fault) -> bool:
        """Whether this rank knew of a fault before the stack in ``fault``, its own, was taken.

        That may show the restart; what the rank did before, ``own_silence`` has seen.
        """
        return fault.initial_rank == self._rank and self._fault_seen_in() == fault.iteration

    def _main_stack_if_silent(self, message: dict[str, Any]) -> str | None:
        """Where this rank's main thread is, if ``message`` says that it does not move."""
        frame = sys._current_frames().get(self._main_thread)
        if message["rank"] != self._rank or message["cause"] != "soft-timeout" or frame is None:
            return None
        return "".join(["Main thread (most recent call last):\n", *format_stack(frame)])

    def _on_need_addresses(self, after: int) -> None:
        if after != self._rank:
            self._reporter.submit(lambda ledger: self._look_up(ledger, after))
        elif self._addresses:
            self._send_addresses()  # the monitor process is a replacement
        # else it has just started, and the main thread sends the first ones in a moment

    def _look_up(self, ledger: Ledger, after: int) -> None:
        following = itertools.islice(self._following(after), _KNOWN_SUCCESSORS)
        found = ledger.known_addresses(following)
        self._addresses += found
        self._send_addresses(found)

    def _following(self, rank: int) -> Iterable[int]:
        """The ranks after ``rank`` in the ring, up to our own."""
        for step in range(1, self._world_size):
            following = (rank + step) % self._world_size
            if following == self._rank:
                return
            yield following

    def _send_addresses(self, addresses: list[list[Any]] | None = None) -> None:
        chosen = self._addresses if addresses is None else addresses
        self._monitor_process.send({"op": "addresses", "addresses": chosen})


def _is_due_to_peer(message: dict[str, Any], stack: str | None) -> bool:
    if message["cause"] == "soft-timeout":
        # Without a stack nothing shows that a rank whose threads run did not wait for its peers.
        if stack:  # this rank's own
            return waits_for_peers(stack) or has_pending_operation()
        return bool(message["runs"])
    timeout = message.get("timeout")
    return timeout is not None and timeout["limit"] == "abort"


Job = Callable[[Ledger], None]


class Reporter:
    """The reporter thread: writes to the store what must not wait for the main thread.

    Mostly deaths and timeouts that monitor processes report. The watchdog thread receives them
    and must not block, and the main and the monitor thread may be blocked in a wait of their own:
    hence a third thread with a third connection, made by ``connect`` for the first report: a job
    without faults does not have that. Descriptors are kept for it: in a job whose ranks have used
    up theirs, a death that no rank can record would be waited for as if that rank were to come.
    """

    def __init__(self, connect: Callable[[], Ledger]) -> None:
        self._connect = connect
        self._kept = KeptDescriptors()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Started here: in ``submit`` an asynchronous exception could come before it has started.
        self._thread = threading.Thread(target=self._run, name="ncclops-reporter", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run ``job`` soon, after those before it. Does not block; any thread."""
        self._jobs.put(job)

    def stop(self, timeout_s: float) -> None:
        """Finish what is queued, for at most ``timeout_s``, and end."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        ledger: Ledger | None = None
        while (job := self._jobs.get()) is not None:
            try:
                if ledger is None:
                    self._kept.give()
                    ledger = self._connect()
                job(ledger)
            except Exception as error:  # noqa: BLE001 - the report goes to another main process
                log.warning("a report could not be recorded: %s", error)
                ledger = None
        self._kept.give()
