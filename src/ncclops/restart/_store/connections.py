"""Connections to the store, and ending a wait of the main thread on a peer that does not come.

Every connection leads straight to the store's server at first, and after it was lost. Where the
ranks of this host share a relay, ``_Moves`` has them go over that soon, in the background: no call
and no restart waits for a relay.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from traceback import walk_stack
from types import FrameType
from typing import Any
from weakref import ref

from torch import distributed
from torch.distributed import Store

from ncclops.restart._groups import gloo_sockets, kept_beside, kept_default
from ncclops.restart._process import keep_alive
from ncclops.restart._store.addresses import resolve
from ncclops.restart._store.client import Connection, Patience, StoreClient, StorePath
from ncclops.restart._store.relay_client import RelayClients, RelayedStore
from ncclops.restart._store.variables import relay_is_wanted
from ncclops.restart.log import logged
from ncclops.restart.settings import Settings
from ncclops.restart.store import (
    PrefixStore,
    TCPStore,
    another_connection,
    connect_to_server,
    critical_ranks,
    job_prefix,
)

Address = tuple[str | None, int]

# The store factory has its own.
_NO_LIMIT_S = -1.0
# A wait that is to be ended is not held up for longer by the lookup of a name.
_NAME_WITHIN_S = 1.0
# How long a server is looked for: one of the function's own holds up no restart for longer, and
# ours, while a connection to it is being made, no call.
_SERVER_WITHIN_S = 1.0
# A server that listens, and has many to serve, answers by then.
_REPLACED_WITHIN = timedelta(seconds=30)
# Functions of torch.
_MAKERS = frozenset({"_new_process_group_helper", "_reconfigure"})


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

    def pass_over(self) -> None:
        """The next call gets the name of the one that would follow it."""
        next(self._numbers)


# Those of the process, and of each iteration under way around the next call, the innermost last.
# A call inside another one is numbered within the iteration: in the last one, a rank that failed
# early has not come to it, and others have.
_calls = [_Calls("")]


def pass_over_call() -> None:
    """This process makes one call less than those of the other ranks have made."""
    _calls[-1].pass_over()


class Connections:
    """To the store of one call; each thread uses one of its own, as a wait occupies it.

    ``critical_ranks`` are those of the store that the factory made, ``first`` is the main thread's
    connection in the name space of this call. Raises what the factory raises.
    """

    def __init__(self, settings: Settings) -> None:
        self._own_sockets: set[int] = set()
        self._of_kept_group: set[int] = set()  # its connection to the store
        self._servers: set[Address] = set()
        # Of stores of the function's own, by descriptor and inode: where to.
        self._shut_down: dict[tuple[int, int], tuple[str, int]] = {}
        self._connecting = threading.Lock()
        shares = relay_is_wanted(os.environ)
        self._patience = Patience.within(settings.barrier_timeout)
        self._job = job_prefix()  # once: the function may change variables on one rank alone
        self._around = _calls[-1].around
        self._name = self._call = _calls[-1].next_name()
        self._inside: _Calls | None = None
        self._for_assignment: StoreClient | None = None
        self._groups_made = 0  # in the present iteration
        self._begin_path()
        factory: Any = settings.store_factory
        made, sockets = self._make(lambda: factory(**(settings.store_kwargs or {})), _NO_LIMIT_S)
        # For each rank it would be one more. One is kept that is not the relay's: the server goes
        # with its last client. (And another factory's store may be the server.)
        is_kept = os.environ.get("RANK", "0") == "0" or not isinstance(made, TCPStore)
        self._made = made if is_kept else None
        self.critical_ranks = critical_ranks(made)
        self._server = (made.host, made.port) if isinstance(made, distributed.TCPStore) else None
        self._timeout = made.timeout
        self.first = self._path.client(_prefixed(self._prefix, made, sockets))
        self._moves = self._moves_to_relay() if shares and self._server is not None else None
        self._use_relay()

    def begin(self, iteration: int) -> None:
        """Wrapped functions that are called from now on are called inside ``iteration``."""
        self.close()
        self._use_relay()
        self._groups_made = 0
        self._inside = _Calls(f"{self._name}/{iteration}/", around=self)
        _calls.append(self._inside)

    def enter_generation(self, number: int) -> None:
        """Have ``first``, and all connections that are made from now on, lead to its name space.

        Those that were made before stay in theirs.
        """
        self.close()
        self._name = f"{self._call}/g{number}" if number else self._call
        self._begin_path()
        self._for_assignment = None
        self.first = self._path.client(self._path.connect())
        if self._moves is not None:
            self._moves = self._moves_to_relay()
            self._use_relay()

    def _begin_path(self) -> None:
        """Of this name space alone: a client of the one before connects again, and moves to the
        relay, in its own, also while this one begins."""
        self._prefix = prefix = f"{self._job}/{self._name}"
        self._path = StorePath(
            lambda: self._connect(prefix), self._patience, self._see_that_server_listens
        )

    @property
    def is_inner(self) -> bool:
        """Whether the call is made inside an iteration of another one."""
        return self._around is not None

    def close(self) -> None:
        """No iteration is under way any more, nor a call inside it. The connections stay."""
        if self._inside in _calls:
            del _calls[_calls.index(self._inside) :]
        self._inside = None

    def for_assignment(self) -> Store:
        """For rank assignments that are called on each rank, and use torch's store themselves."""
        if self._moves is not None and self._for_assignment is None:
            self._for_assignment = self._path.client(self._path.connect(), moves=False)
        store = (self._for_assignment or self.first).store
        assert isinstance(store, Store)
        return store

    def another(self) -> StoreClient:
        """A further connection, in the same name space. Any thread."""
        path = self._path
        made = path.client(path.connect())
        self._use_relay()
        return made

    def for_groups(self, iteration: int) -> Store:
        """For the process groups of ``iteration``, over a separate connection.

        It is shut down when the iteration is aborted, which ends a wait on it. A group that is made
        after another one would find the addresses of that: it has a name space of its own. A rank
        that tries once more to make the same one finds its peers.
        """
        return self._for_group("groups", iteration)

    def for_shrinkable_group(self, iteration: int) -> Store:
        """Likewise, for a default group of which another one may be made later.

        That makes connections of its own, to the same name space."""
        return self._for_group("shrinkable", iteration)

    def _for_group(self, kind: str, iteration: int) -> Store:
        store, _ = self._unkept()
        return PrefixStore(f"{self._prefix}/{iteration}/{kind}/{self._groups_made}", store)

    def name_for_kept_group(self, iteration: int) -> str:
        """The name space of the default group that is made in ``iteration``, and may outlive it."""
        return f"{self._prefix}/{iteration}/kept/{self._groups_made}"

    def for_kept_group(self, name: str) -> Store:
        """For the default group with that name space.

        Over a connection of its own, which is shut down like that of ``for_groups``, but only where
        the main thread waits on it.
        """
        store, self._of_kept_group = self._unkept()
        return PrefixStore(name, store)

    def for_group_beside(self, iteration: int) -> tuple[Store, set[int]]:
        """For a group that is made beside the default one in ``iteration``, and may outlive it.

        Over a connection of its own, whose sockets come with it: once the group is made they are
        ``_groups.kept_beside``' to tell, and no wait that is ended shuts them down.
        """
        store, sockets = self._unkept()
        return PrefixStore(f"{self._prefix}/{iteration}/beside", store), sockets

    def _unkept(self) -> tuple[Store, set[int]]:
        """A connection that does not count as our own, and its sockets."""
        with self._connecting:  # or it would be taken for our own, which are never shut down
            before = _inodes()
            store = self._clone()
            sockets = _inodes() - before
            for sock in gloo_sockets.handles_on(sockets):
                with sock:
                    keep_alive(sock)
        return store, sockets

    def group_is_made(self) -> None:
        """A default group has been made with what ``for_groups`` has returned last."""
        self._groups_made += 1

    def end_wait(self, frame: FrameType, world_size: int) -> None:
        """End a wait of ``frame``, the main thread's, for a peer: on a store, or in Gloo."""
        kept_beside.end_waits()
        keep = self._kept_sockets() | kept_beside.sockets()
        if _is_making_a_group(frame):
            kept_default.cut()
        else:
            keep |= self._of_kept_group
        for host, port in self._servers:
            gloo_sockets.shut_down_connections_to(host, port, keep=keep)
        for host, port in _addresses_of(_stores_in(frame)) - self._servers:
            self._shut_down |= gloo_sockets.shut_down_connections_to(host, port, keep=keep)
        gloo_sockets.shut_down_gloo_connections()
        if _is_making_a_group(frame):
            numbers = {*range(world_size + 1), *kept_default.numbers_being_connected()}
            gloo_sockets.answer_gloo_rendezvous(numbers)

    def connect_again(self) -> None:
        """Connect the stores of the function's own whose connections ``end_wait`` has shut down.

        One that was made before the call is used in the next iteration, and torch does not connect
        again: a new connection takes the place of the old one behind the store's descriptor. The
        main thread is out of the function, so nothing waits on it.
        """
        shut_down, self._shut_down = self._shut_down, {}
        for (fd, inode), (host, port) in shut_down.items():
            with logged("connecting a store of the function again"), self._connecting:
                if gloo_sockets.socket_inodes().get(fd) == inode:  # the store is still there
                    _replace_connection(fd, host, port)

    def _kept_sockets(self) -> set[int]:
        """Our own, and those of the calls around this one: these go on when it restarts."""
        around = set() if self._around is None else self._around._kept_sockets()
        return self._own_sockets | around

    # --- connecting -----------------------------------------------------------------------------

    def _use_relay(self) -> None:
        """Have all clients use the relay soon, where there is to be one."""
        if self._moves is not None:
            self._moves.begin()

    def _moves_to_relay(self) -> _Moves:
        assert self._server is not None
        host, port = self._server
        server = self._server_host() or host, port
        clients = RelayClients(server, self._job, self._patience.answer_s)
        prefix = self._prefix
        return _Moves(self._path, lambda: clients.join(prefix))

    def _server_host(self) -> str | None:
        """The address of the store's server, as the first connection to it has it."""
        return next((host for host, _ in self._servers), None)

    def _connect(self, prefix: str) -> Connection:
        """To the name space ``prefix``.

        Raises ``ConnectionRefusedError`` where no server listens any more.
        """
        limit_s = self._patience.reconnect_s
        self._find_server(limit_s)  # torch tries for minutes, and pauses for seconds in between
        store, sockets = self._make(self._clone, limit_s)
        return _prefixed(prefix, store, sockets)

    def _find_server(self, limit_s: float) -> None:
        """Raises ``OSError`` where no server is found."""
        if self._server is not None:
            host, port = self._server
            socket.create_connection((self._server_host() or host, port), limit_s).close()

    def _see_that_server_listens(self) -> None:
        """Raises ``ConnectionRefusedError``; what is slow or out of descriptors may still come."""
        try:
            self._find_server(_SERVER_WITHIN_S)
        except ConnectionRefusedError:
            raise
        except OSError:
            pass

    def _clone(self) -> Store:
        if self._made is not None:
            return another_connection(self._made, self._server_host())
        assert self._server is not None
        host, port = self._server
        return connect_to_server(self._server_host() or host, port, self._timeout)

    def _make(self, make: Callable[[], Store], limit_s: float) -> tuple[Store, frozenset[int]]:
        """What ``make`` makes, and its sockets to the server. All of them count as our own."""
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
        return store, frozenset(servers)


class _Moves:
    """Moves the clients of ``path`` to the relay: ``join`` gives a connection to it, or ``None``.

    That may take seconds: it happens in a thread, while there is something to do.
    """

    def __init__(self, path: StorePath, join: Callable[[], RelayedStore | None]) -> None:
        self._path = ref(path)  # a call that ends leaves the store, also while the thread joins
        self._join = join
        self._lock = threading.Lock()
        self._asked = self._running = False

    def begin(self) -> None:
        """Have those that are not there go over the relay soon. Does not block."""
        path = self._path()
        if path is None or not path.clients_to_move():
            return
        with self._lock:
            self._asked = True
            path.settled.clear()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="ncclops-relay", daemon=True).start()

    def _run(self) -> None:
        while self._goes_on():
            path = self._path()
            clients = path.clients_to_move() if path is not None else []
            del path
            with logged("moving to the relay to the store"):
                for client in clients:
                    if (store := self._join()) is None:
                        break
                    if (known := client()) is not None:
                        known.move(store)
                    del known

    def _goes_on(self) -> bool:
        with self._lock:
            self._running, self._asked = self._asked, False
            if not self._running and (path := self._path()) is not None:
                path.settled.set()
            return self._running


def _prefixed(prefix: str, store: Store, sockets: Collection[int]) -> Connection:
    return Connection(PrefixStore(prefix, store), sockets)


def _peers_on_port(inodes: Collection[int], port: int) -> dict[int, Address]:
    """Those of the sockets that are connected to ``port``, and to which host."""
    found: dict[int, Address] = {}
    for inode in inodes:
        for sock in gloo_sockets.handles_on([inode]):
            with sock, contextlib.suppress(OSError):
                host, there = sock.getpeername()[:2]
                if there == port:
                    found[inode] = host, there
    return found


def _replace_connection(fd: int, host: str, port: int) -> None:
    """Have ``fd`` be a new connection to the store's server there, once that has agreed to it.

    Raises ``OSError`` or ``DistNetworkError`` where no server listens any more.
    """
    socket.create_connection((host, port), _SERVER_WITHIN_S).close()  # torch tries for minutes
    before = _inodes()
    made = connect_to_server(host, port, _REPLACED_WITHIN)
    for sock in gloo_sockets.handles_on(_peers_on_port(_inodes() - before, port)):
        with sock:
            os.dup2(sock.fileno(), fd, inheritable=False)
    del made  # its own descriptor goes with it


def _inodes() -> set[int]:
    return set(gloo_sockets.socket_inodes().values())


def _is_making_a_group(frame: FrameType) -> bool:
    """Whether ``frame`` or one of its callers is torch's making of a process group, or the
    reconfiguration of one."""
    return any(f.f_code.co_name in _MAKERS for f, _ in walk_stack(frame))


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
