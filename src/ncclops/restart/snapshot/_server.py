"""The thread that keeps copies for other ranks, and hands out what this rank has.

It lives as long as the call of the wrapped function: a restart is when it is needed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

from ncclops.restart._store.addresses import reachable_host
from ncclops.restart.snapshot._errors import PeerError
from ncclops.restart.snapshot._planning import Label
from ncclops.restart.snapshot._wire import TOKEN_CHARACTERS, Address, Connection

if TYPE_CHECKING:
    from ncclops.restart.snapshot._memory import Memory

log = logging.getLogger("ncclops.restart")

_GREETED_WITHIN_S = 5.0
# Each rank has one connection of the rank that it keeps copies for; in a restart there are those of
# ranks that fetch. Whoever does not greet is no rank of the job, and a rank greets at once: where
# too many have not, the one that has had the longest time for it goes.
_MOST_CONNECTIONS = 1024
_MOST_UNGREETED = 32
_NEXT_AFTER_S = 0.1


class Server:
    """Listens at the address of this host that other ranks reach, on a port of its own.

    Raises ``OSError`` where it cannot.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        host = reachable_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        token = secrets.token_hex(TOKEN_CHARACTERS // 2)
        self.address = Address(host, self._listener.getsockname()[1], token)
        self._connections: set[Connection] = set()
        self._ungreeted: dict[Connection, None] = {}  # the oldest first
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._start(self._accept, "ncclops-snapshot-server")

    def close(self) -> None:
        """End the thread and all connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for each in connections:
            each.close()

    def _start(self, target: Any, name: str, *args: object) -> None:
        threading.Thread(target=target, args=args, name=name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed.wait(_NEXT_AFTER_S):
                    return
                log.debug("accepting a connection for snapshots: %s", error)  # no descriptor left
                continue
            connection = Connection(sock)
            with self._lock:
                has_room = len(self._connections) < _MOST_CONNECTIONS
                oldest = None
                if len(self._ungreeted) >= _MOST_UNGREETED:
                    oldest = next(iter(self._ungreeted))
                    del self._ungreeted[oldest]
                if has_room:
                    self._ungreeted[connection] = None
            if oldest is not None:
                oldest.close()
            try:
                if has_room:
                    self._start(self._serve, "ncclops-snapshot-peer", connection)
                    continue
            except RuntimeError as error:  # no thread is to be had
                log.debug("a connection for snapshots: %s", error)
                with self._lock:
                    self._ungreeted.pop(connection, None)
            connection.close()

    def _serve(self, connection: Connection) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            try:
                is_ours = connection.is_greeted(self.address.token, _GREETED_WITHIN_S)
            finally:
                with self._lock:
                    self._ungreeted.pop(connection, None)
            while is_ours and (request := connection.next_request()) is not None:
                self._answer(connection, request)
        except (OSError, PeerError) as error:
            log.debug("a connection for snapshots ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: Connection, request: dict[str, Any]) -> None:
        """Raises ``PeerError`` where what follows on the connection cannot be understood."""
        try:
            kind = "put" if "put" in request else "get"
            label = Label.from_json(request[kind])
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"not a request: {error}") from error
        if kind == "get":
            blob = self._memory.find(label)
            if blob is None:
                connection.answer({"error": f"no such snapshot of step {label.step} here"})
            else:
                connection.send_blob(blob)
            return
        try:
            buffer = self._memory.room_for_copy(label)
        except MemoryError as error:
            connection.answer({"error": str(error)[:500]})
            return
        try:
            blob = connection.receive_blob(label, request.get("header_bytes"), lambda _: buffer)
        except PeerError as error:
            connection.answer({"error": str(error)[:500]})
            raise  # what follows on the connection may be the rest of it
        finally:
            self._memory.is_received(label)
        self._memory.keep_copy(blob)
        connection.answer({"ok": True})
