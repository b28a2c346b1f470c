"""Connections to the store, and ending a wait of the main thread on a peer that does not come."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from traceback import walk_stack
from types import FrameType
from typing import Any

from torch import distributed
from torch.distributed import Store

from ncclops.restart import _gloo_sockets
from ncclops.restart._addresses import resolve
from ncclops.restart._process import keep_alive
from ncclops.restart._store_client import Connection, Patience, StoreClient, StorePath
from ncclops.restart.settings import Settings
from ncclops.restart.store import PrefixStore, another_connection, job_prefix

Address = tuple[str | None, int]

# The store factory has its own.
_NO_LIMIT_S = -1.0
# A wait that is to be ended is not held up for longer by the lookup of a name.
_NAME_WITHIN_S = 1.0


class _Calls:
    """The names of the calls of wrapped functions that follow each other inside ``place``.

    ``around`` are the connections of the call that they are made in, if they are made in one.
    """

    def __init__(self, place: str, around: Connections | None = None) -> None:
        self.around = around
        self._place = place
        self._numbers = itertools.count()

    def next_name(self) -> str:
        """All ranks make the same calls in the same order, so they agree on it."""
        return f"{self._place}call{next(self._numbers)}"


# Those of the process, and of each iteration under way around the next call, the innermost last.
# A call inside another one is numbered within the iteration: in the last one, a rank that failed
# early has not come to it, and others have.
_calls = [_Calls("")]


class Connections:
    """To the store of one call; each thread uses one of its own, as a wait occupies it.

    ``raw_store`` is what the store factory made, ``first`` the main thread's connection in the
    name space of this call. Raises what the factory raises.
    """

    def __init__(self, settings: Settings) -> None:
        self._own_sockets: set[int] = set()
        self._servers: set[Address] = set()
        self._connecting = threading.Lock()
        self._path = StorePath(self._connect, Patience.within(settings.barrier_timeout))
        self._around = _calls[-1].around
        self._name = _calls[-1].next_name()
        self._inside: _Calls | None = None
        self._prefix = f"{job_prefix()}/{self._name}"
        factory: Any = settings.store_factory
        made = self._make(lambda: factory(**(settings.store_kwargs or {})), _NO_LIMIT_S)
        self.raw_store: Store = made.store
        self.first = self._path.client(self._prefixed(made))

    def begin(self, iteration: int) -> None:
        """Wrapped functions that are called from now on are called inside ``iteration``."""
        self.close()
        self._inside = _Calls(f"{self._name}/{iteration}/", around=self)
        _calls.append(self._inside)

    def close(self) -> None:
        """No iteration is under way any more, nor a call inside it. The connections stay."""
        if self._inside in _calls:
            del _calls[_calls.index(self._inside) :]
        self._inside = None

    def another(self) -> StoreClient:
        """A further connection, in the same name space. Any thread."""
        return self._path.client(self._connect())

    def for_groups(self, iteration: int) -> Store:
        """For the process groups of ``iteration``, over a separate connection.

        It is shut down when the iteration is aborted, which ends a wait on it.
        """
        with self._connecting:  # or it would be taken for our own, which are never shut down
            before = _inodes()
            store = another_connection(self.raw_store, self._server_host())
            for sock in _gloo_sockets.handles_on(_inodes() - before):
                with sock:
                    keep_alive(sock)
        return PrefixStore(f"{self._prefix}/{iteration}/groups", store)

    def end_wait(self, frame: FrameType, world_size: int) -> None:
        """End a wait of ``frame``, the main thread's, for a peer: on a store, or in Gloo."""
        for host, port in (*self._servers, *_addresses_of(_stores_in(frame))):
            _gloo_sockets.shut_down_connections_to(host, port, keep=self._kept_sockets())
        _gloo_sockets.shut_down_gloo_connections()
        if _is_making_a_group(frame):
            _gloo_sockets.answer_gloo_rendezvous(world_size + 1)

    def _kept_sockets(self) -> set[int]:
        """Our own, and those of the calls around this one: these go on when it restarts."""
        around = set() if self._around is None else self._around._kept_sockets()
        return self._own_sockets | around

    # --- connecting -----------------------------------------------------------------------------

    def _connect(self) -> Connection:
        """Raises ``ConnectionRefusedError`` where no server listens any more."""
        limit_s = self._path.patience.reconnect_s
        if isinstance(self.raw_store, distributed.TCPStore):
            # torch tries for minutes, and pauses for seconds in between
            address = self._server_host() or self.raw_store.host, self.raw_store.port
            socket.create_connection(address, limit_s).close()
        make = functools.partial(another_connection, self.raw_store, self._server_host())
        return self._prefixed(self._make(make, limit_s))

    def _server_host(self) -> str | None:
        """The address of the store's server, as the first connection to it has it."""
        return next((host for host, _ in self._servers), None)

    def _make(self, make: Callable[[], Store], limit_s: float) -> Connection:
        """What ``make`` makes, with its sockets, which count as our own."""
        # The reporter makes one while the main thread is in the function.
        if not self._connecting.acquire(timeout=limit_s):
            raise TimeoutError("another connection to the store is being made, and that hangs")
        try:
            before = _inodes()
            store = make()
            new = _inodes() - before
            self._own_sockets |= new
        finally:
            self._connecting.release()
        servers = _peers_on_port(new, store.port) if isinstance(store, distributed.TCPStore) else {}
        self._servers = self._servers.union(servers.values())  # another thread may go through it
        return Connection(store, frozenset(servers))

    def _prefixed(self, connection: Connection) -> Connection:
        return connection._replace(store=PrefixStore(self._prefix, connection.store))


def _peers_on_port(inodes: Collection[int], port: int) -> dict[int, Address]:
    """Those of the sockets that are connected to ``port``, and to which host."""
    found: dict[int, Address] = {}
    for inode in inodes:
        for sock in _gloo_sockets.handles_on([inode]):
            with sock, contextlib.suppress(OSError):
                host, there = sock.getpeername()[:2]
                if there == port:
                    found[inode] = host, there
    return found


def _inodes() -> set[int]:
    return set(_gloo_sockets.socket_inodes().values())


def _is_making_a_group(frame: FrameType) -> bool:
    """Whether ``frame`` or one of its callers is torch's making of a process group."""
    return any(f.f_code.co_name == "_new_process_group_helper" for f, _ in walk_stack(frame))


def _stores_in(frame: FrameType) -> Iterable[Store]:
    """The stores among the local variables of ``frame`` and its callers."""
    for caller, _ in walk_stack(frame):
        for value in list(caller.f_locals.values()):
            if isinstance(value, Store):
                yield value


def _addresses_of(stores: Iterable[Store]) -> set[Address]:
    """Where the servers of those of ``stores`` are that are TCPStores at the bottom.

    The host is ``None``, which stands for any, of a name that no name server answers for in time.
    """
    bottoms: set[tuple[str, int]] = set()
    for store in stores:
        bottom: Any = store
        while isinstance(bottom, distributed.PrefixStore):
            bottom = bottom.underlying_store
        if isinstance(bottom, distributed.TCPStore):
            bottoms.add((bottom.host, bottom.port))
    found: set[Address] = set()
    for host, port in bottoms:
        try:
            found |= {(address, port) for address in resolve(host, _NAME_WITHIN_S)}
        except OSError:
            found.add((None, port))
    return found
