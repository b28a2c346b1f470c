"""What may take long, in a thread beside the loop: one thing at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

_log = logging.getLogger(__name__)


class Aside:
    """Does one thing at a time in a thread; its result is taken by the loop, which it wakes."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._results: deque[Callable[[], None]] = deque()
        self.is_busy = False

    def start(
        self, work: Callable[[], Callable[[], None]], otherwise: Callable[[str], None]
    ) -> None:
        """Do ``work`` in a thread; what it returns is called in the loop. Not while it is busy.

        Where it raises, ``otherwise`` is, with the error in a line.
        """

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - the boundary of the thread; told
                _log.debug("what was done beside the loop", exc_info=True)
                result = partial(otherwise, f"internal error: {type(error).__name__}: {error}")
            self._results.append(result)
            self._wake()

        self.is_busy = True
        # A file system that hangs may hold it for ever: nobody waits for it in the end.
        threading.Thread(target=run, daemon=True).start()

    def take(self) -> None:
        """In the loop: the result, if there is one."""
        if self._results:
            self.is_busy = False
            self._results.popleft()()
