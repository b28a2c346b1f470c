"""One thread's connection to the store, with a deadline for every call; made anew when it is lost.

A call that waits for no other rank and is not answered within ``Patience.answer_s`` counts as a
lost connection, and so does one that breaks. The client then connects again, for at most
``Patience.reconnect_s``, and repeats the call. What may have happened already is repeated only
where twice is the same as once: all of them but an addition, see ``AdditionUnknown``. torch's store
does not answer to what is written without a question (``set``, ``append``): that is repeated, too,
unless something was answered later.

TCPStore has the operations that the ledger is made of (``append``, ``compare_set``); FileStore and
stores written in Python have them not at all, or not atomically, and get them built from ``add``,
which every store has.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import ref

from torch.distributed import DistNetworkError, Store

from ncclops.restart._deadline import run_within
from ncclops.restart._groups.gloo_sockets import handles_on
from ncclops.restart._process import set_deadlines
from ncclops.restart._store.relay_client import RelayedStore
from ncclops.restart.exception import RestartError

log = logging.getLogger("ncclops.restart")

T = TypeVar("T")

# Where connecting is refused there is no server any more; but a proxy may be starting again.
_REFUSED_FOR_S = 1.0
_PAUSE_S = 0.1
# A connection that is lost again and again, at once, is no connection.
_MOST_ATTEMPTS = 3

# A client in use is moved to the relay when it is idle, if that is soon.
_IDLE_WITHIN_S = 1.0
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.05, 0.2
_NO_KEY = "none"


class AdditionUnknown(RestartError):
    """The connection was lost during an addition; whether that was carried out is not known.

    The connection has been made anew.
    """


@dataclass(frozen=True)
class Patience:
    """How long a call waits for its answer, and how long it tries to connect again, in seconds."""

    answer_s: float = 60.0
    reconnect_s: float = 30.0

    @classmethod
    def within(cls, barrier_timeout: timedelta) -> Patience:
        """What fits into the time that the other ranks wait for this one."""
        whole_s = barrier_timeout.total_seconds()
        return cls(min(60.0, 0.4 * whole_s), min(30.0, 0.3 * whole_s))


AnyStore: TypeAlias = "Store | RelayedStore"


class Connection(NamedTuple):
    """A store, and the inodes of its sockets, as far as they are known."""

    store: AnyStore
    inodes: Collection[int] = ()


class StorePath:
    """The way to the store, which all clients of a process share.

    ``connect`` makes another connection to the same store in the same name space, and
    ``see_that_server_listens`` raises ``ConnectionRefusedError`` where none listens: the server may
    end while torch connects to it, which then waits for another. Once one client has connected
    again in vain the path is ``lost`` to all of them: a thread that still waits for an answer does
    not wait to the end of its own patience. ``settled``: no client is about to be moved, to the
    relay of this host.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        patience: Patience,
        see_that_server_listens: Callable[[], object] = lambda: None,
    ) -> None:
        self.connect = connect
        self.see_that_server_listens = see_that_server_listens
        self.patience = patience
        self.lost = False
        self.settled = threading.Event()
        self.settled.set()
        self._clients: list[ref[StoreClient]] = []
        self._adding = threading.Lock()

    def client(self, connection: Connection, *, moves: bool = True) -> StoreClient:
        """One that uses ``connection`` at first. ``moves``: it may be moved to the relay."""
        made = StoreClient(connection, self, moves=moves)
        with self._adding:
            self._clients = [*(known for known in self._clients if known() is not None), ref(made)]
        return made

    def clients_to_move(self) -> list[ref[StoreClient]]:
        """Those that do not use the relay yet."""
        clients = [(known, known()) for known in self._clients]
        return [known for known, client in clients if client is not None and client.is_to_move]

    def give_up(self) -> None:
        """The store cannot be reached any more."""
        self.lost = True
        for known in self._clients:
            if (client := known()) is not None:
                client.renew()


class StoreClient:
    """What the ledger needs of a store. One thread's; ``renew`` may be called by any.

    Without ``path`` a lost connection stays lost. Methods raise what the store raises.
    """

    def __init__(
        self, connection: Connection, path: StorePath | None = None, *, moves: bool = True
    ) -> None:
        self._path = path
        self._moves = moves
        self._patience = path.patience if path is not None else Patience()
        self._in_use = threading.Lock()
        self._unanswered: list[Callable[[AnyStore], object]] = []
        self._use(connection)

    # --- operations -----------------------------------------------------------------------------

    def add(self, key: str, amount: int, *, repeatable: bool = False) -> int:
        """Add ``amount`` to the number at ``key``; returns the sum.

        Raises ``AdditionUnknown`` unless it is ``repeatable``: where too much does no harm.
        """

        def operation(store: AnyStore) -> int:
            return int(store.add(key, amount))

        return self._ask(operation, once=amount != 0 and not repeatable)

    def set(self, key: str, value: str) -> None:
        """Set ``key``."""
        self._write(lambda store: store.set(key, value))

    def get(self, key: str) -> str:
        """The value of ``key``, which has one."""
        return self.wait(key, timedelta(seconds=self._patience.answer_s))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` have a value."""
        return self._ask(lambda store: bool(store.check(list(keys))))

    def delete(self, key: str) -> None:
        """Delete ``key``, where the store can."""
        self._ask(lambda store: store.delete_key(key))

    def list_keys(self) -> list[str]:
        """All keys of our name space, in no order; none where the store cannot list them."""
        return self._ask(lambda store: list(getattr(store, "list_keys", list)()))

    def wait(self, key: str, timeout: timedelta) -> str:
        """The value of ``key`` once it has one. Raises what the store raises when that is late."""
        deadline = time.monotonic() + timeout.total_seconds()

        def operation(store: AnyStore) -> str:
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            return _wait(store, key, left)

        return self._do(operation)

    def wait_long(self, key: str, timeout: timedelta) -> str:
        """Like ``wait``, where that may take as long as the job.

        A client that waits cannot be moved to the relay. If that is about to happen, this looks for
        the key at times until it has.
        """
        pause_s = _FIRST_LOOK_S
        while (path := self._path) is not None and self.is_to_move and not path.settled.is_set():
            if self.check([key]):
                break
            path.settled.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        return self.wait(key, timeout)

    def append(self, key: str, line: str) -> None:
        """Add ``line`` to the log at ``key``; concurrent ones all survive, in some order.

        It may be there twice.
        """
        self._write(lambda store: _append(store, key, line))

    def read_log(self, key: str) -> list[str]:
        """The lines of the log at ``key``, none if nothing was written."""
        return self._ask(lambda store: _read_log(store, key))

    def publish(self, key: str, value: str) -> None:
        """Set ``key`` unless it is set already: the first value stands."""
        self._write(lambda store: _publish(store, key, value))

    def read_counts(self, keys: Sequence[str]) -> list[int] | None:
        """What was added up under each of ``keys``; ``None`` if one of them is still without."""
        return self._ask(lambda store: _read_counts(store, keys))

    def set_many(self, values: Mapping[str, str]) -> None:
        """Set all of ``values``, in one message where the store can."""
        self._write(lambda store: _set_many(store, values))

    # --- the connection -------------------------------------------------------------------------

    def renew(self) -> None:
        """Give up the present connection, which may be lost without a sign: a new one is made.

        A call that waits on it goes on waiting on the new one. Any thread.
        """
        if isinstance(self._store, RelayedStore):
            self._store.shut_down()
        for sock in handles_on(self._inodes):
            with sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def give_up(self) -> None:
        """Have a call that waits fail, and make no new connection for it. Any thread."""
        self._path, self._moves = None, False
        self.renew()

    def move(self, store: RelayedStore) -> None:
        """Use ``store`` from now on, unless a call is under way for longer. Any thread."""
        if not self._in_use.acquire(timeout=_IDLE_WITHIN_S):
            return
        try:
            # torch's store does not answer to all that is written: with this, it is there.
            self._store.check([_NO_KEY])
            self._use(Connection(store))
            if not self._moves:
                self.renew()  # it was given up just now
        except DistNetworkError as error:
            log.debug("not moved to the relay: %s", error)
            self.renew()  # the next call connects again
        else:
            self._unanswered.clear()
        finally:
            self._in_use.release()

    @property
    def is_to_move(self) -> bool:
        """Whether it may be moved to the relay, and does not use that."""
        return self._moves and not isinstance(self._store, RelayedStore)

    @property
    def store(self) -> AnyStore:
        """The store over the present connection, for the thread that the client is for."""
        return self._store

    def _use(self, connection: Connection) -> None:
        self._store, self._inodes = connection
        for sock in handles_on(self._inodes):
            with sock, contextlib.suppress(OSError):
                set_deadlines(sock, self._patience.answer_s)

    def _ask(self, operation: Callable[[AnyStore], T], *, once: bool = False) -> T:
        """What ``operation`` returns, which is answered after all that was written before."""
        answer = self._do(operation, once=once)
        self._unanswered.clear()
        return answer

    def _write(self, operation: Callable[[AnyStore], object]) -> None:
        self._do(operation)
        self._unanswered.append(operation)

    def _do(self, operation: Callable[[AnyStore], T], *, once: bool = False) -> T:
        with self._in_use:
            for attempt in range(1, _MOST_ATTEMPTS + 1):
                try:
                    return operation(self._store)
                except DistNetworkError as error:
                    path = self._path
                    if path is None or path.lost or attempt == _MOST_ATTEMPTS:
                        raise
                    self._connect_again(path, error)
                    if once:
                        raise AdditionUnknown(
                            f"the connection to the store was lost: {error}"
                        ) from error
        raise AssertionError("unreachable")

    def _connect_again(self, path: StorePath, error: Exception) -> None:
        """A new connection in the place of the one that broke. Raises ``error`` if it fails."""
        started = time.monotonic()
        self.renew()  # a late answer on it would be taken for that of the next call
        while (left_s := started + self._patience.reconnect_s - time.monotonic()) > 0:
            left = timedelta(seconds=left_s)
            try:
                listens = path.see_that_server_listens
                self._use(
                    run_within(left, "connecting to the store", path.connect, meanwhile=listens)
                )
                for written in self._unanswered:
                    written(self._store)
            except ConnectionRefusedError:
                if time.monotonic() - started > _REFUSED_FOR_S:
                    break
            except (RuntimeError, OSError, RestartError) as failure:
                log.debug("connecting to the store again: %s", failure)
            else:
                if self._path is None:  # it was given up just now
                    self.renew()
                    break
                log.warning("a connection to the store was lost and made again: %s", brief(error))
                return
            if path.lost:
                break
            time.sleep(_PAUSE_S)
        if self._path is not None:
            path.give_up()
        raise error


def brief(error: BaseException) -> str:
    """The first line of ``error``: torch adds the stack of its own code."""
    return next(iter(str(error).splitlines()), type(error).__name__)


# --- operations of a store ------------------------------------------------------------------------


def _append(store: AnyStore, key: str, line: str) -> None:
    if _is_extended(store):
        store.append(key, line + "\n")
    else:
        slot = store.add(f"{key}/slots", 1)
        store.set(f"{key}/slot/{slot}", line)


def _read_log(store: AnyStore, key: str) -> list[str]:
    if _is_extended(store):
        # Not by ``get``, with which a relay answers what it knows: a log grows.
        return store.multi_get([key])[0].decode().splitlines() if store.check([key]) else []
    slots = [f"{key}/slot/{slot}" for slot in range(1, store.add(f"{key}/slots", 0) + 1)]
    # A slot that is taken and still empty belongs to a writer that has not counted it yet, or
    # that died and will be reported: either way a later event reads the log again.
    return [store.get(slot).decode() for slot in slots if store.check([slot])]


def _publish(store: AnyStore, key: str, value: str) -> None:
    try:
        # The second time for those that wait already: not every server of torch 2.5 wakes them
        # on a compare_set. It sets the same value, whichever rank was first.
        store.set(key, store.compare_set(key, "", value).decode())
    except DistNetworkError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        if _is_extended(store):
            raise
        if not _lacks_compare_set(error):
            raise
        if store.add(f"{key}/claims", 1) == 1:
            store.set(key, value)


def _wait(store: Any, key: str, timeout: timedelta) -> str:
    if not _is_extended(store):
        store.wait([key], timeout)
        return str(store.get(key).decode())
    # Their get waits by itself: one message less.
    usual = store.timeout
    store.set_timeout(timeout)
    try:
        return str(store.get(key).decode())
    finally:
        store.set_timeout(usual)


def _read_counts(store: AnyStore, keys: Sequence[str]) -> list[int] | None:
    if not store.check(list(keys)):
        return None
    if _is_extended(store):
        return list(map(int, store.multi_get(list(keys))))
    return [store.add(key, 0) for key in keys]


def _set_many(store: AnyStore, values: Mapping[str, str]) -> None:
    if _is_extended(store):
        store.multi_set(list(values), list(values.values()))
        return
    for key, value in values.items():
        store.set(key, value)


def _is_extended(store: Any) -> bool:
    return bool(store.has_extended_api())


def _lacks_compare_set(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, NotImplementedError) or "assert" in text or "not implemented" in text
