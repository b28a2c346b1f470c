"""The thread of one iteration that does what training does not wait for, and what may block.

It talks to the store and to other ranks. The main thread only waits for it, in steps: so it can be
interrupted there when another rank fails, which it could not be in a call of the store.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ncclops.restart._store.client import StoreClient
from ncclops.restart.snapshot._errors import SnapshotError

if TYPE_CHECKING:
    from ncclops.restart.snapshot._wire import Connection

log = logging.getLogger("ncclops.restart")

T = TypeVar("T")

# How soon a thread that waits in the store notices that it is not needed any more.
_SLICE = timedelta(seconds=1)
_LOOK_AGAIN_S = 0.02
_ENDS_WITHIN_S = 5.0


class Closed(Exception):
    """The iteration is over; what the thread was doing is not wanted any more."""


class Background:
    """One thread, one connection to the store, and those to other ranks.

    ``connect`` makes the connection to the store, in the thread.
    """

    def __init__(self, connect: Callable[[], StoreClient]) -> None:
        self._connect = connect
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.closed = False
        self.failure: BaseException | None = None
        self.connections: set[Connection] = set()
        self._leaves_alone = threading.Event()  # it does not write to any snapshot just now
        self._leaves_alone.set()
        self._awaits: queue.SimpleQueue[Any] | None = None  # what the main thread hands over
        self._client: StoreClient | None = None
        self._thread = threading.Thread(target=self._run, name="ncclops-snapshot", daemon=True)
        self._thread.start()

    # --- the main thread ------------------------------------------------------------------------

    def submit(self, task: Callable[[], object]) -> None:
        """Have the thread do ``task`` after what it has been given before."""
        self._tasks.put(task)

    def result_of(self, task: Callable[[], T], timeout: timedelta) -> T:
        """What ``task`` returns, or raises. Raises ``SnapshotError`` after ``timeout``."""
        found: list[T] = []
        done = threading.Event()

        def run() -> None:
            found.append(task())
            done.set()

        self.submit(run)
        self.wait(done, timeout)
        return found[0]

    def wait(self, event: threading.Event, timeout: timedelta) -> None:
        """Until ``event``. Raises what the thread has failed with, and ``SnapshotError`` after
        ``timeout``."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not event.wait(_LOOK_AGAIN_S):  # in steps: see above
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > deadline:
                raise SnapshotError(f"the other ranks were not there within {timeout}")

    def close(self) -> None:
        """End the thread. It changes no snapshot any more when this returns."""
        self.closed = True
        self._tasks.put(None)
        if (awaited := self._awaits) is not None:
            awaited.put(None)
        for each in list(self.connections):
            each.close()
        if (client := self._client) is not None:
            client.give_up()
        self._leaves_alone.wait(_ENDS_WITHIN_S)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._client = self._connect()
            while (task := self._tasks.get()) is not None and not self.closed:
                task()
        except Closed:
            pass
        except BaseException as error:
            self.failure = error
            if not self.closed:
                log.debug("snapshots: %s", error, exc_info=True)
        finally:
            for each in list(self.connections):
                each.close()
            self._client = None

    @contextlib.contextmanager
    def changing_snapshots(self) -> Iterator[None]:
        """What is done inside is not done once ``close`` was called. The thread alone."""
        self._leaves_alone.clear()
        try:
            if self.closed:
                raise Closed
            yield
        finally:
            self._leaves_alone.set()

    @property
    def client(self) -> StoreClient:
        """The store. The thread alone."""
        assert self._client is not None
        return self._client

    def wait_for_key(self, key: str, timeout: timedelta) -> str:
        """The value of ``key`` once it has one. The thread alone.

        Raises ``Closed``, ``SnapshotError`` after ``timeout``, and what the store raises.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.closed:
            began = time.monotonic()
            try:
                return self.client.wait(key, _SLICE)
            except RuntimeError as error:  # torch's stores have no exception for this alone
                if time.monotonic() - began < _SLICE.total_seconds() / 2:
                    raise
                if time.monotonic() > deadline:
                    raise SnapshotError(
                        f"no rank has told {key.rpartition('/')[2]!r} within {timeout}"
                    ) from error
        raise Closed

    def next_of(self, handed_over: queue.SimpleQueue[T]) -> T:
        """The next of what the main thread hands over. The thread alone. Raises ``Closed``."""
        self._awaits = handed_over  # before the look at ``closed``: ``close`` sets that first
        while not self.closed:
            try:
                handed = handed_over.get(timeout=_SLICE.total_seconds())
            except queue.Empty:
                continue
            if handed is not None:
                return handed
        raise Closed
