"""What the main thread hears from the monitor thread, and until when it waits for it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from ncclops.restart.agreement import INITIAL
from ncclops.restart.attribution import Causes
from ncclops.restart.exception import InternalError, StoreGone
from ncclops.restart.ledger import Ledger
from ncclops.restart.monitor_thread import (
    Aborted,
    Agreed,
    MonitorMessage,
    MonitorThread,
    StoreConnectionLost,
)
from ncclops.restart.settings import Settings
from ncclops.restart.store import BarrierTimeout

# Between the end of a process and its report in the ledger, where several monitor processes have
# to pass it on.
_REPORTED_WITHIN = timedelta(seconds=10)


class Inbox:
    """Of one call of a wrapped function. Main thread, whose ``ledger`` it is.

    ``ask_to_look_again`` is called when a barrier takes longer than ``barrier_patience``.

    All methods raise ``StoreGone`` when the store does not answer any more. Causes that an
    agreement names are noted in ``causes``.
    """

    def __init__(
        self,
        settings: Settings,
        monitor_thread: MonitorThread,
        ledger: Ledger,
        causes: Causes,
        ask_to_look_again: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._messages = monitor_thread.messages
        self._ledger = ledger
        self._causes = causes
        self._ask_to_look_again = ask_to_look_again
        self._fault_seen_at = 0.0  # monotonic

    def next(self, timeout: timedelta | None) -> MonitorMessage:
        """The next message. Raises ``queue.Empty`` when it is late."""
        message = self._get(timeout)
        if isinstance(message, StoreConnectionLost):
            raise store_gone(message.error) from message.error
        if isinstance(message, Aborted):
            self._fault_seen_at = message.seen_at
        return message

    def _get(self, timeout: timedelta | None) -> MonitorMessage:
        if timeout is None:
            return self._messages.get()
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                return self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                # A Python that was built for a glibc before 2.30 waits by the wall clock, and ends
                # early when that is set forwards.
                if time.monotonic() >= deadline:
                    raise

    def agreement(self, iteration: int) -> Agreed:
        """How ``iteration`` ended. Raises ``BarrierTimeout``."""
        timeout, patience = self._barrier_deadline(iteration), self._settings.barrier_patience
        try:
            try:
                message = self.next(patience)
            except queue.Empty:
                self._ask_to_look_again()
                message = self.next(timeout - patience)
        except queue.Empty:
            where = f"barrier of iteration {iteration}" if iteration >= 0 else "initial barrier"
            raise BarrierTimeout(
                f"{where}: not all ranks arrived within {timeout} (barrier_timeout, and what "
                "the hard timeout allows), and no rank reported the missing ones lost"
            ) from None
        return self._agreed(message)

    def agreement_within(self, timeout: timedelta) -> Agreed:
        """The next agreement. Raises ``queue.Empty`` when it is late."""
        return self._agreed(self.next(timeout))

    def _agreed(self, message: MonitorMessage) -> Agreed:
        if not isinstance(message, Agreed):
            raise InternalError(f"expected the agreement, got {message}")
        self._causes.note_faults(message.agreement.faults)
        return message

    def _barrier_deadline(self, iteration: int) -> timedelta:
        """How long to wait for the others. On the way here each has the hard timeout twice without
        any progress, in the abort and in finalize and health check, and is ended after that."""
        settings = self._settings
        if iteration == INITIAL:
            return settings.barrier_timeout
        allowed = 2 * settings.hard_timeout + settings.termination_grace_time
        since = timedelta(seconds=time.monotonic() - self._fault_seen_at)
        return max(settings.barrier_timeout, allowed - since + _REPORTED_WITHIN)

    def in_whole(self, agreed: Agreed) -> Agreed:
        """``agreed`` with all faults, for a rank that explains what happened."""
        if not agreed.agreement.brief:
            return agreed
        agreement = self._ledger.whole_agreement(agreed.agreement.iteration)
        if agreement is None:
            return agreed
        self._causes.note_faults(agreement.faults)
        return replace(agreed, agreement=agreement)


def store_gone(error: Exception) -> StoreGone:
    """``error`` of the store's connection, as what a rank ends with."""
    return StoreGone(f"the store does not answer any more: {error}")
