"""The monitor thread: waits for the outcome of an iteration, and ends it when that is a fault.

It waits in blocking calls of the store, over a separate connection, and sends the main thread
what happened through a queue.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

from ncclops.restart._assignment.world import Place
from ncclops.restart._groups.aborting import before_silent_ends
from ncclops.restart._groups.open_operations import no_group_of_operations
from ncclops.restart._groups.recorder import may_have_pending_operation
from ncclops.restart._interrupt.main_thread import Interrupter
from ncclops.restart._interrupt.other_threads import are_there_others, end_threads_at_work
from ncclops.restart._observer import place
from ncclops.restart.abort import Abort
from ncclops.restart.agreement import Agreement
from ncclops.restart.attribution import Fault
from ncclops.restart.exception import RankShouldRestart
from ncclops.restart.ledger import COMPLETED, Ledger
from ncclops.restart.log import logged
from ncclops.restart.state import FrozenState

__all__ = ["MonitorThread", "RankShouldRestart"]

log = logging.getLogger("ncclops.restart")

# poll(2) takes milliseconds in an int, which overflows after 24 days.
_LONGEST_WAIT = timedelta(days=20)
# A thread that waits for nothing but its next task.
_IDLE_ENDS_WITHIN_S = 0.05


@dataclass(frozen=True)
class Completed:
    """All active ranks came back from the function."""


@dataclass(frozen=True)
class Aborted:
    """A fault was seen at monotonic time ``seen_at``; the groups are aborted and main is out.

    ``collect_s`` is what the snapshot of this rank took before that.
    """

    seen_at: float
    abort_s: float
    collect_s: float = 0.0


@dataclass(frozen=True)
class Agreed:
    """The barrier is complete."""

    agreement: Agreement
    placement: Place | None


@dataclass(frozen=True)
class StoreConnectionLost:
    """The store does not answer any more."""

    error: Exception


MonitorMessage = Completed | Aborted | Agreed | StoreConnectionLost


@dataclass(frozen=True)
class _Task:
    """Watch an iteration (``state`` given), or only the barrier before the first one."""

    iteration: int
    state: FrozenState | None


class MonitorThread:
    """One per call of a wrapped function. The main thread reads ``messages``.

    ``ledger`` is the thread's own; ``interrupter`` is shared with the main thread.
    """

    def __init__(
        self,
        ledger: Ledger,
        interrupter: Interrupter,
        abort: Abort | None,
        *,
        initial_rank: int,
        last_call_wait: timedelta,
        agreement_timeout: timedelta,
        abort_timeout: timedelta,
        wake: int | None,
        unblock: Callable[[FrameType], None],
        before_interrupting: Callable[[], None],
        own_silence: Callable[[float | None], Fault | None],
        take_snapshot: Callable[[int], object] | None = None,
        note_abort: Callable[[int, bool], object],
    ) -> None:
        self.messages: queue.SimpleQueue[MonitorMessage] = queue.SimpleQueue()
        self.fault_seen_in: int | None = None  # the iteration; set before anything is aborted
        self._stopped = False
        self._ledger = ledger
        self._interrupter = interrupter
        self._abort = abort
        self._initial_rank = initial_rank
        self._last_call_wait = last_call_wait
        self._agreement_timeout = agreement_timeout
        self._abort_timeout = abort_timeout
        self._wake = wake
        self._unblock = unblock
        self._before_interrupting = before_interrupting
        self._own_silence = own_silence
        self._take_snapshot = take_snapshot
        self._note_abort = note_abort
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ncclops-monitor", daemon=True)
        self._thread.start()

    def expect_agreement(self, iteration: int) -> None:
        """Wait for the barrier at the end of ``iteration`` alone."""
        self._tasks.put(_Task(iteration, None))

    def watch(self, iteration: int, state: FrozenState) -> None:
        """Watch ``iteration``; messages: ``Completed``, or ``Aborted`` and then ``Agreed``."""
        self._tasks.put(_Task(iteration, state))

    def look_again(self, iteration: int) -> None:
        """Other ranks are in the barrier after ``iteration``: see that this one knows. Any thread.

        A connection over which nothing comes any more looks like one on which nothing has happened.
        """
        if self.fault_seen_in is None or self.fault_seen_in < iteration:
            log.warning("the end of iteration %d was not noticed: connecting again", iteration)
            self._ledger.renew()

    def stop(self, timeout_s: float) -> None:
        """End the thread, in a wait for other ranks too, and wait for that a while."""
        self._tasks.put(None)
        self._thread.join(_IDLE_ENDS_WITHIN_S)
        if self._thread.is_alive():
            self._stopped = True
            self._ledger.give_up()
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._perform(task)
            except Exception as error:
                if self._stopped:
                    return
                log.debug("the store failed", exc_info=True)
                self._leave(task)
                self.messages.put(StoreConnectionLost(error))
                return

    def _perform(self, task: _Task) -> None:
        if task.state is not None:
            outcome, waited_s = self._wait_for_outcome(task.iteration)
            if outcome == COMPLETED:
                self.messages.put(Completed())
                return
            seen_at = time.monotonic()
            self.fault_seen_in = task.iteration
            self._note_own_silence(task.iteration, waited_s)
            # Only where the user asks for it: nothing announces that no further fault will come.
            time.sleep(self._last_call_wait.total_seconds())
            collect_s = self._collect(task.iteration)
            abort_s = self._leave(task)
            self.messages.put(Aborted(seen_at, abort_s, collect_s))
        agreement, placement = self._ledger.wait_for_agreement(
            task.iteration, self._initial_rank, self._agreement_timeout
        )
        self.messages.put(Agreed(agreement, placement))

    def _wait_for_outcome(self, iteration: int) -> tuple[str, float | None]:
        while True:
            started = time.monotonic()
            try:
                return self._ledger.wait_for_outcome(iteration, _LONGEST_WAIT)
            except RuntimeError:
                if time.monotonic() - started < _LONGEST_WAIT.total_seconds() - 1:
                    raise

    def _note_own_silence(self, iteration: int, waited_s: float | None) -> None:
        """While the main thread is still where it was."""
        with logged("looking at this rank's own progress"):
            if (fault := self._own_silence(waited_s)) is not None:
                self._ledger.note_silent(iteration, fault)

    def _collect(self, iteration: int) -> float:
        """Take a snapshot of this rank before anything is aborted; the seconds that it took."""
        if self._take_snapshot is None:
            return 0.0
        started = time.monotonic()
        with logged("taking a snapshot of this rank"):
            self._take_snapshot(iteration)
        return time.monotonic() - started

    def _leave(self, task: _Task) -> float:
        """Abort, and get the main thread out of the function; returns the seconds of the abort."""
        if task.state is None:
            return 0.0
        with (
            self._interrupter.ending(),
            no_group_of_operations(is_out=lambda: not self._interrupter.armed),
        ):
            # The abort makes the function fail, or interrupts it.
            with logged("keeping the workers of data loaders"):
                self._before_interrupting()
            started = time.monotonic()
            if self._abort is not None:
                self._abort_within_deadline(self._abort, task.iteration, task.state)
            abort_s = time.monotonic() - started
            with logged("interrupting the function"):
                self._interrupter.interrupt(self._wake, self._unblock)
        return abort_s

    def _abort_within_deadline(self, abort: Abort, iteration: int, state: FrozenState) -> None:
        """Run ``abort``; one that hangs must not keep the main thread in the function."""

        def run() -> None:
            with logged("the abort"):
                place("abort")
                before_silent_ends.set(self._leave_ahead)
                self._note_abort(iteration, True)
                try:
                    abort(state)
                finally:
                    self._note_abort(iteration, False)

        thread = threading.Thread(target=run, name="ncclops-abort", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no memory for its stack, or too many
            log.error("the abort has no thread of its own, so no deadline: %s", error)
            run()
            return
        thread.join(self._abort_timeout.total_seconds())
        if thread.is_alive():
            log.error("abort is not done after %s; going on without it", self._abort_timeout)

    def _leave_ahead(self) -> None:
        """Before waits for the device end without an error."""
        self._interrupter.raise_ahead()
        # Asked last: the recorder copies all that it has, for this thread of one abort.
        if are_there_others() and may_have_pending_operation():
            end_threads_at_work(RankShouldRestart)
