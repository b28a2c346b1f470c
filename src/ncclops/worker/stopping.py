"""Lets a script's own SIGTERM handler finish: a stop is no fault, and no restart may interrupt it.

When the launcher stops a job, each worker gets SIGTERM, and one that exits at once would have the
restart core interrupt another that is still writing its last checkpoint. So a handler that ends
the process has it wait: the worker reports that it is ready, and the launcher sends a second
SIGTERM once all are. Where the signal came to this rank alone, from elsewhere, the others do not
end, and none is waited for.
"""

from __future__ import annotations

import functools
import os
import select
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from ncclops.record import worker_record
from ncclops.record.events import ReadyToEndEvent
from ncclops.restart import _calls
from ncclops.worker import no_restart

# A scheduler may signal all processes of a job at once, and this one before the launcher.
_STOP_COMES_WITHIN_S = 5.0


def _wait_for_the_others(set_handler: Callable[[int, Any], Any]) -> None:
    """Until the launcher says that all are ready; it ends us if that takes too long. Not if no stop
    is under way.

    The signal may come to any thread, at any moment from here on: it must not run the script's
    handler again, and what it writes into a pipe is found by this thread wherever that is.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    set_handler(signal.SIGTERM, lambda _number, _frame: None)
    worker_record.report(ReadyToEndEvent())
    came, _, _ = select.select([read_fd], [], [], _STOP_COMES_WITHIN_S)
    if not came and not no_restart.is_needed():
        return
    while os.read(read_fd, 1) != bytes([signal.SIGTERM]):
        pass  # another signal's


class StopSignal:
    """Watches what handler the script sets."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._set_handler = signal.signal
        self._has_waited = False

    def watch(self) -> None:
        """From now on, handlers that are set for SIGTERM run in one piece."""
        signal.signal = self._signal  # type: ignore[assignment]

    def _signal(self, number: int, handler: Any) -> Any:
        if number == signal.SIGTERM and callable(handler):
            handler = self._in_one_piece(handler)
        return self._set_handler(number, handler)

    def _in_one_piece(
        self, handler: Callable[[int, FrameType | None], Any]
    ) -> Callable[[int, FrameType | None], Any]:
        running = False

        @functools.wraps(handler)
        def handle(number: int, frame: FrameType | None) -> Any:
            nonlocal running
            if os.getpid() != self._pid:  # a child that the script has forked, which waits for none
                return handler(number, frame)
            if running:  # a scheduler has sent the signal to all processes, and the launcher again
                return None
            with _calls.atomic():
                running = True
                try:
                    return handler(number, frame)
                except SystemExit:
                    if not self._has_waited:  # within a handler that has called the one before it
                        self._has_waited = True
                        _wait_for_the_others(self._set_handler)
                    raise
                finally:
                    running = False

        return handle
