"""The reporter thread: writes to the store what must not wait for the main thread.

Deaths and timeouts that guardians report, mostly. The watchdog thread receives them and must not
block, the main and the monitor thread may be blocked in a wait of their own, hence a third
thread with a third connection. Both come into being with the first report: in a job without
faults they do not exist.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ncclops.restart.ledger import Ledger

log = logging.getLogger("ncclops.restart")

Job = Callable[[Ledger], None]


class Reporter:
    """Runs jobs one after the other over a ledger of its own, made by ``connect`` when needed."""

    def __init__(self, connect: Callable[[], Ledger]) -> None:
        self._connect = connect
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Run ``job`` soon. Does not block; called by one thread."""
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ncclops-reporter", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Finish what is queued, for at most ``timeout_s``, and end."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        ledger: Ledger | None = None
        while (job := self._jobs.get()) is not None:
            try:
                ledger = ledger or self._connect()
                job(ledger)
            except Exception as error:  # noqa: BLE001 - the guardian tries elsewhere
                log.warning("a report could not be recorded: %s", error)
                ledger = None
