"""One process per host that talks to the store for all ranks of the host.

Every rank has a connection to the store for its main thread, one for its monitor thread, and one
for its reporter thread once there is a fault: at 16,384 ranks more than 32,768 at one server, each
with requests of its own. In a job of several hosts the ranks of a host share a *relay*: they
connect to it over a Unix socket, and it has two connections to the store, whatever the number of
its ranks: one for requests, and one that waits for a key. (torch's client takes no request while
it waits; where several keys are waited for at once there is one more for each.) See
``_store.variables.relay_is_wanted`` for where they do.

What it saves:

* **Waits.** A key is asked for once for all ranks of the host. What a rank waits for is written
  once and never changed, so its value is kept, and answers the ranks that come later.
* **Requests.** While one is under way, those of the other ranks gather; then equal ones are sent
  as one, additions to a number are sent as one sum, and lines for a log as one text. A rank has at
  most one request under way, so all that gather are concurrent, and the store may see them in any
  order: the answers are those of an order in which they could have come singly. Nothing waits for
  requests to gather, so a request that comes alone is not later for it.

What it must not cost: a rank, or a restart. It keeps nothing that is not in the store, and has no
recovery of its own: when its connection to the store breaks, it ends. A rank whose relay ends, in
the middle of a request or of a wait, has lost a connection, as if the store had closed it: what may
be repeated is repeated over a new one, and an addition is made good in the way that the top of
``ledger.py`` describes. That new connection leads straight to the store: see
``_store.relay_client``, which judges the relay. A rank that ends or stops holds up no other one:
the relay never waits for a rank.

The relay is started like the store's server, as a process of its own that no rank's end takes
away, and ends when its last rank has gone. Standard library, and torch's TCPStore without torch.

Messages are JSON after a length of four bytes; a request is a list of an operation of torch's store
and its arguments, the answer what that returns. Every second the relay sends an empty message, a
*beat*, to each rank that waits for an answer: one that is stopped is known by its silence.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ncclops.restart import store_server
from ncclops.restart._groups.gloo_sockets import handles_on, socket_inodes
from ncclops.restart._process import ignore_what_is_sent_to_all, set_deadlines

log = logging.getLogger("ncclops.restart.relay")

BEAT_EVERY_S = 1.0
# As the store's server: a rank that begins another call finds it there.
_LINGER_S = 0.2
_FIRST_RANK_WITHIN_S = 60.0
_CONNECT_WITHIN_S = 10.0
# poll(2) takes milliseconds in an int.
_LONGEST_WAIT = timedelta(days=20)
# Values that were waited for: those of an iteration and the one before are asked for.
_MOST_KEPT = 64
_IDLE_WAITERS = 1

_READ_AND_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE
_LENGTH = struct.Struct("!I")


def encode(message: object) -> bytes:
    """``message`` as it is sent."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


BEAT = _LENGTH.pack(0)


class Frames:
    """The messages in a stream of bytes; a beat is an empty one."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes."""
        self._received += data
        found = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            found.append(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return found


class _Rank:
    """One connection of a rank. Any thread sends; none is ever held up by the rank."""

    def __init__(self, sock: socket.socket, has_backlog: Callable[[_Rank], None]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._has_backlog = has_backlog
        self.frames = Frames()
        self._lock = threading.Lock()
        self._request: _Request | None = None  # the one under way
        self._unsent = b""

    def ask(self, message: list[Any]) -> _Request:
        """``message`` as the rank's request that is under way."""
        self._request = _Request(message, self)
        return self._request

    def answer(self, request: _Request | None, value: object) -> None:
        """Send the answer to ``request``, unless that is cancelled or answered."""
        with self._lock:
            if request is not None and request is self._request:
                self._request = None
                self._send(encode(value))

    def cancel(self) -> None:
        """Answer what is under way, if it is, with ``None``."""
        self.answer(self._request, None)

    def beat(self) -> None:
        """Have the rank know that this process runs, if it waits."""
        with self._lock:
            if self._request is not None and not self._unsent:
                self._send(BEAT)

    def flush(self) -> bool:
        """Send what the rank has not taken so far; whether it has all now."""
        with self._lock:
            # One that is gone shows when it is read from.
            with contextlib.suppress(OSError):
                while self._unsent:
                    self._unsent = self._unsent[self.sock.send(self._unsent) :]
            return not self._unsent

    def close(self) -> None:
        """The rank has gone."""
        self._request = None
        self.sock.close()

    def _send(self, data: bytes) -> None:
        self._unsent += data
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        if self._unsent:
            self._has_backlog(self)


class _Request:
    """Of a rank, or without one of the relay itself."""

    def __init__(self, message: list[Any], rank: _Rank | None = None) -> None:
        self.message = message
        self._rank = rank

    def answer(self, value: object) -> None:
        """Any thread."""
        if self._rank is not None:
            self._rank.answer(self, value)


class Relay:
    """Serves the ranks that connect to ``listener`` until the last has gone.

    ``connect`` makes a connection to the store. While it does, a relay whose ranks go ends, too.
    """

    def __init__(self, listener: socket.socket, connect: Callable[[], Any]) -> None:
        self._store: Any = None
        self._connect = connect
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._ranks: set[_Rank] = set()
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._values = _Values(connect, self._look_up, self._fail)
        self._backlogs: queue.SimpleQueue[_Rank] = queue.SimpleQueue()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._over = False

    def run(self) -> None:
        """Serve. Returns when no rank is left, or the store's connection has broken."""
        # Once more, by this process: the ranks see who it is that listens.
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._on_wake)
        _start(self._serve_requests, "requests")
        now = time.monotonic()
        next_beat, end = now, now + _FIRST_RANK_WITHIN_S
        while not self._over and (self._ranks or now < end):
            pause_s = next_beat - now if self._ranks else min(next_beat, end) - now
            for key, _ in self._selector.select(max(0.0, pause_s)):
                had_ranks = bool(self._ranks)
                key.data()
                if had_ranks or self._ranks:
                    end = time.monotonic() + _LINGER_S
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_EVERY_S
                for rank in self._ranks:
                    rank.beat()
        self._end()

    def _end(self) -> None:
        self._listener.close()
        for sock in (self._wake_r, self._wake_w, *(rank.sock for rank in self._ranks)):
            sock.close()
        self._selector.close()
        self._requests.put(None)
        self._values.close()

    def _fail(self) -> None:
        """The store cannot be used any more. Any thread."""
        log.warning("the connection to the store was lost", exc_info=True)
        self._over = True
        self._wake()

    def _note_backlog(self, rank: _Rank) -> None:
        """Send ``rank`` the rest when it takes more. Any thread."""
        self._backlogs.put(rank)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_w.send(b"x")

    def _on_wake(self) -> None:
        self._wake_r.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                self._watch(self._backlogs.get_nowait(), _READ_AND_WRITE)

    def _watch(self, rank: _Rank, events: int) -> None:
        if rank in self._ranks:
            self._selector.modify(rank.sock, events, lambda: self._on_ready(rank))

    # --- ranks ----------------------------------------------------------------------------------

    def _on_connection(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if peer_of(sock)[1] not in (os.getuid(), 0):
            sock.close()
            return
        rank = _Rank(sock, self._note_backlog)
        self._ranks.add(rank)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._on_ready(rank))

    def _on_ready(self, rank: _Rank) -> None:
        if self._selector.get_key(rank.sock).events == _READ_AND_WRITE and rank.flush():
            self._watch(rank, selectors.EVENT_READ)
        try:
            data = rank.sock.recv(1 << 18)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(rank.sock)
            self._ranks.discard(rank)
            rank.close()
            return
        for frame in rank.frames.feed(data):
            self._on_request(rank, json.loads(frame))

    def _on_request(self, rank: _Rank, message: list[Any]) -> None:
        if message[0] == "cancel":
            rank.cancel()
            return
        request = rank.ask(message)
        if message[0] == "get":
            self._values.ask(request, message[1])
        else:
            self._requests.put(request)

    # --- requests (a thread of their own) -------------------------------------------------------

    def _look_up(self, key: str) -> None:
        """See whether ``key`` has a value, after the requests that came before."""
        self._requests.put(_Request(["look up", key]))

    def _serve_requests(self) -> None:
        try:
            self._store = self._connect()
            while (batch := self._gathered()) is not None:
                for requests in _alike(batch):
                    self._perform(requests)
        except Exception:  # noqa: BLE001 - whatever it is, the ranks do better without this relay
            self._fail()

    def _gathered(self) -> list[_Request] | None:
        """All requests that wait now, at least one; ``None`` at the end."""
        batch = [self._requests.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(self._requests.get_nowait())
        requests = [request for request in batch if request is not None]
        return requests if len(requests) == len(batch) else None

    def _perform(self, requests: Sequence[_Request]) -> None:
        """Answer ``requests``, which are alike, with one of the store."""
        operation, *arguments = requests[0].message
        if operation == "hello":
            _answer(requests, os.getpid())
        elif operation == "look up":
            (key,) = arguments
            self._values.looked_up(key, self._store.get(key) if self._store.check([key]) else None)
        elif operation == "add":
            self._add(arguments[0], requests)
        elif operation == "append":
            lines = "".join(request.message[2] for request in requests)
            _answer(requests, self._store.append(arguments[0], lines))
        elif operation == "list_keys":
            _answer(requests, self._keys_under(arguments[0]))
        else:
            _answer(requests, _as_text(getattr(self._store, operation)(*arguments)))

    def _keys_under(self, prefix: str) -> list[str]:
        """The keys that begin with ``prefix``, without it; none where they cannot be listed."""
        # Older torch cannot list keys; and Python not where one of them, anybody's, is no text.
        with contextlib.suppress(AttributeError, UnicodeDecodeError):
            return [k.removeprefix(prefix) for k in self._store.list_keys() if k.startswith(prefix)]
        return []

    def _add(self, key: str, requests: Sequence[_Request]) -> None:
        amounts = [int(request.message[2]) for request in requests]
        number = self._store.add(key, sum(amounts)) - sum(amounts)
        for request, amount in zip(requests, amounts, strict=True):
            number += amount
            request.answer(number)


class _Values:
    """Values that ranks wait for, each asked for once. Any thread.

    Only for keys that are written once. ``look_up`` has ``looked_up`` called in time; ``fail`` is
    called when a connection breaks.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        look_up: Callable[[str], None],
        fail: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._look_up = look_up
        self._fail = fail
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._waiting: dict[str, list[_Request]] = {}
        self._idle: list[queue.SimpleQueue[str | None]] = []  # of connections without a wait

    def ask(self, request: _Request, key: str) -> None:
        """Answer ``request`` with the value of ``key``, once that has one."""
        with self._lock:
            known = self._known.get(key)
            if known is None:
                self._ask_once(key).append(request)
        if known is not None:
            request.answer(known)

    def _ask_once(self, key: str) -> list[_Request]:
        """Those that wait for ``key``, which the store is asked for."""
        if key not in self._waiting:
            self._waiting[key] = []
            if self._idle:
                self._idle.pop().put(key)
            else:  # it may be there already, and no further connection needed
                self._look_up(key)
        return self._waiting[key]

    def looked_up(self, key: str, value: bytes | None) -> None:
        """``value`` is what ``key`` had."""
        if value is not None:
            self._found(key, value.decode())
            return
        with self._lock:
            keys = self._idle.pop() if self._idle else None
            if keys is None:
                keys = queue.SimpleQueue()
                _start(self._wait, "wait", keys)
            keys.put(key)

    def close(self) -> None:
        """No connection is idle any more."""
        with self._lock:
            while self._idle:
                self._idle.pop().put(None)

    def _found(self, key: str, value: str) -> None:
        with self._lock:
            self._known[key] = value
            if len(self._known) > _MOST_KEPT:
                del self._known[next(iter(self._known))]
            waiting = self._waiting.pop(key)
        _answer(waiting, value)

    def _wait(self, keys: queue.SimpleQueue[str | None]) -> None:
        """The thread of a connection that waits."""
        try:
            store = self._connect()
            store.set_timeout(_LONGEST_WAIT)
            while (key := keys.get()) is not None:
                value = store.get(key).decode()
                with self._lock:  # before the ranks ask for the next
                    if len(self._idle) == _IDLE_WAITERS:
                        keys.put(None)
                    else:
                        self._idle.append(keys)
                self._found(key, value)
        except Exception:  # noqa: BLE001 - as above
            self._fail()


def _alike(batch: Sequence[_Request]) -> list[list[_Request]]:
    """``batch``, taken apart into what one request of the store can do."""
    found: dict[str, list[_Request]] = {}
    for request in batch:
        adds_up = request.message[0] in ("add", "append")
        shared = request.message[:2] if adds_up else request.message
        found.setdefault(json.dumps(shared), []).append(request)
    return list(found.values())


def _answer(requests: Sequence[_Request], value: object) -> None:
    for request in requests:
        request.answer(value)


def _as_text(value: object) -> object:
    """``value`` for JSON."""
    if isinstance(value, bytes):
        return value.decode()
    return [each.decode() for each in value] if isinstance(value, list) else value


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process (0: of another pid name space) and the user at the other end."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


def _start(run: Callable[..., object], name: str, *arguments: object) -> None:
    threading.Thread(target=run, args=arguments, name=f"relay-{name}", daemon=True).start()


# --- the process --------------------------------------------------------------------------------


def start(listener: socket.socket, server: tuple[str, int], answer_s: float, tcp_store: Any) -> Any:
    """Start the relay to ``server`` on ``listener``. See ``store_server.start_detached``."""
    fd = listener.fileno()
    return store_server.start_detached(
        lambda: _host(fd, server, answer_s, tcp_store),
        name="ncclops-relay",
        module="ncclops.restart._store.relay",
        keep=fd,
        arguments=(str(fd), *map(str, server), str(answer_s)),
    )


def main(path: list[str]) -> None:
    """Entry of the fresh interpreter; ``path`` is where the starter finds its modules."""
    if os.fork():
        os._exit(0)
    sys.path.extend(place for place in path if place not in sys.path)
    faulthandler.enable()
    fd, host, port, answer_s = sys.argv[1:]
    _host(int(fd), (host, int(port)), float(answer_s), store_server.load_tcp_store())


def _host(fd: int, server: tuple[str, int], answer_s: float, tcp_store: Any) -> None:
    ignore_what_is_sent_to_all()
    store_server.disable_name_lookups()
    connecting, limit_s = threading.Lock(), min(answer_s, _CONNECT_WITHIN_S)

    def connect() -> Any:
        with connecting:
            # Where the server has gone torch would try for long.
            socket.create_connection(server, limit_s).close()
            before = set(socket_inodes().values())
            limit = timedelta(seconds=limit_s)
            store = tcp_store(*server, None, False, limit, wait_for_workers=False)
            for sock in handles_on(set(socket_inodes().values()) - before):
                with sock:
                    set_deadlines(sock, answer_s)
        return store

    Relay(socket.socket(fileno=fd), connect).run()
    os._exit(0)  # threads that wait in the store do not end
