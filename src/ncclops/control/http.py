"""HTTP/1.1 on one connection at a time, with a limit on everything a client decides.

The protocol is h11's; sockets are asyncio's. What requests mean is in ``routes``.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11

# Requests that have to wait are answered together: training is interrupted once for all of them.
_TICK_S = 0.1
# Little at a time: h11 looks at the size of what is not whole yet, each time it gets some more.
_CHUNK = 8 << 10
_DRAINED_CHUNKS = 128


@dataclass(frozen=True)
class Limits:
    """What one client, and all of them together, may take. Times in seconds.

    A request that is not whole after ``request_s`` ends its connection, one byte a second or none.
    Where all of ``connections`` are taken, a request is awaited for ``crowded_s`` only, and so is a
    client that takes no answer: those that do nothing must not keep out those that do. Then each
    gets one answer, and its place goes to the next: nor must those that ask without end.
    After an answer to a request that is not read to its end, ``linger_s`` are for the client to
    read it: closed at once, the kernel would throw it away on the client's side.
    A body comes in ``body_chunks`` at most: taking a chunk apart costs as much for one byte as for
    a thousand, and everybody else waits for it.
    Requests beyond ``requests_per_s`` are delayed, but for ``burst`` after a pause: however many
    clients look at a job, they must not take its cores.
    """

    head_bytes: int = 16 << 10
    body_bytes: int = 64 << 10
    body_chunks: int = 256
    request_s: float = 10.0
    response_s: float = 10.0
    linger_s: float = 1.0
    crowded_s: float = 0.25
    connections: int = 128
    requests_per_s: float = 100.0
    burst: int = 50


@dataclass(frozen=True)
class Request:
    """A whole request. Names of headers are in lower case; of several with one name, the last."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Response]]


class BadRequest(Exception):
    """A request that cannot be answered but by ``status``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def json_response(
    status: int, document: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    return Response(status, json.dumps(document).encode() + b"\n", headers=headers or {})


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(status, {"error": message}, headers)


class Pace:
    """Turns at ``Limits.requests_per_s``."""

    def __init__(self, limits: Limits) -> None:
        self._gap_s = 1 / limits.requests_per_s
        self._ahead_s = limits.burst * self._gap_s
        self._next = float("-inf")

    def take_turn(self, now: float) -> float:
        """The seconds that a request at ``now``, a time of any clock, has to wait."""
        self._next = max(self._next, now - self._ahead_s) + self._gap_s
        if self._next <= now:
            return 0.0
        return math.ceil(self._next / _TICK_S) * _TICK_S - now


async def serve(listener: socket.socket, handler: Handler, limits: Limits | None = None) -> None:
    """Answer all connections to ``listener``, until cancelled."""
    limits = limits or Limits()
    listener.setblocking(False)
    loop, pace = asyncio.get_running_loop(), Pace(limits)
    open_: dict[asyncio.Task[None], _Connection] = {}
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError:
            # Out of descriptors, or a client that has gone already. The kernel has no event for
            # "there are descriptors again".
            await asyncio.sleep(0.1)
            continue
        connection = _Connection(
            client, handler, limits, pace, lambda: len(open_) >= limits.connections
        )
        task = loop.create_task(connection.run())
        open_[task] = connection
        task.add_done_callback(open_.pop)
        while len(open_) >= limits.connections:
            await _one_ends(open_, limits.crowded_s)


async def _one_ends(open_: dict[asyncio.Task[None], _Connection], crowded_s: float) -> None:
    """Wait until one connection has ended, and see to it that a silent one does.

    Returns early where none is silent: those that were accepted just now are not awaited yet.
    """
    silent = [each for each in open_.values() if each.awaited is not None]
    longest = min(silent, key=lambda each: each.awaited_since, default=None)
    limit_s = crowded_s
    if longest is not None:
        now = asyncio.get_running_loop().time()
        limit_s = max(0.0, longest.awaited_since + crowded_s - now)
    done, _ = await asyncio.wait(open_, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if not done and longest is not None and longest.awaited is not None:
        if not longest.awaited.expired():  # by itself, just now: it is on its way out
            longest.awaited.reschedule(0.0)  # long ago
        await asyncio.sleep(0)


class _Connection:
    """One client. ``awaited`` limits how long it is waited for, since ``awaited_since``.

    In the loop's time; None while it is answered. ``crowded``: whether all places are taken.
    """

    def __init__(
        self,
        client: socket.socket,
        handler: Handler,
        limits: Limits,
        pace: Pace,
        crowded: Callable[[], bool],
    ) -> None:
        self._socket = client
        self._handler = handler
        self._limits, self._pace, self._crowded = limits, pace, crowded
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self.awaited: asyncio.Timeout | None = None
        self.awaited_since = 0.0

    async def run(self) -> None:
        self._socket.setblocking(False)
        try:
            # A client that closes its connection, or does not read its answer, is dropped.
            with suppress(OSError, TimeoutError, h11.LocalProtocolError):
                while await self._answer_next():
                    pass
                if self._http.their_state is not h11.DONE:
                    await self._linger()
        finally:
            self._socket.close()

    async def _linger(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        async with self._limited(self._limits.linger_s):
            for _ in range(_DRAINED_CHUNKS):
                if not await self._loop.sock_recv(self._socket, _CHUNK):
                    break

    @asynccontextmanager
    async def _limited(self, seconds: float) -> AsyncIterator[None]:
        """What the client does, or does not do, may take so long; raises ``TimeoutError``."""
        before, self.awaited_since = self.awaited, self._loop.time()
        try:
            async with asyncio.timeout(seconds) as self.awaited:
                yield
        finally:
            self.awaited = before

    async def _answer_next(self) -> bool:
        """Whether there may be another request on this connection."""
        head_only = False
        try:
            request = await self._read_request()
            if request is None:
                return False
            head_only = request.method == "HEAD"
            response = await self._handle(request)
        except BadRequest as error:
            response = error_response(error.status, str(error))
        except h11.RemoteProtocolError as error:
            response = error_response(error.error_status_hint, str(error))
        # Even if that is at once: requests may come without a pause, and others have theirs. One
        # that was given up has waited already.
        late = response.status == HTTPStatus.REQUEST_TIMEOUT
        await asyncio.sleep(0 if late else self._pace.take_turn(self._loop.time()))
        await self._send(response, head_only=head_only)
        if self._http.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            return False
        self._http.start_next_cycle()
        return True

    async def _handle(self, request: Request) -> Response:
        try:
            return await self._handler(request)
        except Exception as error:  # noqa: BLE001 - the boundary of a request: others go on
            traceback.print_exc()
            return error_response(500, f"internal error: {error!r}")

    async def _read_request(self) -> Request | None:
        """The next request, whole; None if there is no more."""
        try:
            async with self._limited(self._limits.request_s):
                return await self._read_whole()
        except TimeoutError:
            if self._http.their_state is h11.IDLE and not self._http.trailing_data[0]:
                return None  # it has not even begun
            raise BadRequest(408, "request timed out") from None

    async def _read_whole(self) -> Request | None:
        head: h11.Request | None = None
        body, chunks = bytearray(), 0
        while True:
            match await self._next_event():
                case h11.Request() as head:
                    pass
                case h11.Data(data=data, chunk_start=starts):
                    body += data
                    chunks += starts
                    if len(body) > self._limits.body_bytes:
                        raise BadRequest(
                            413, f"a body of more than {self._limits.body_bytes} bytes"
                        )
                    if chunks > self._limits.body_chunks:
                        raise BadRequest(
                            413, f"a body in more than {self._limits.body_chunks} chunks"
                        )
                case h11.EndOfMessage():
                    assert head is not None  # h11 keeps the order
                    return _request(head, bytes(body))
                case _:  # the client has closed its side
                    return None

    async def _next_event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await self._write(self._http.send(go_on))
            await asyncio.sleep(0)  # what is there already is received without a pause
            self._http.receive_data(await self._loop.sock_recv(self._socket, _CHUNK))
        return event

    async def _send(self, response: Response, *, head_only: bool) -> None:
        headers = {
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "Cache-Control": "no-store",
            **response.headers,
        }
        if self._http.their_state is not h11.DONE or self._crowded():
            headers["Connection"] = "close"  # what else has come is not read
        head = h11.Response(
            status_code=response.status,
            headers=list(headers.items()),
            reason=HTTPStatus(response.status).phrase,
        )
        parts = [self._http.send(head)]
        if not head_only:
            parts.append(self._http.send(h11.Data(data=response.body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        await self._write(b"".join(part for part in parts if part))

    async def _write(self, data: bytes | None) -> None:
        async with self._limited(self._limits.response_s):
            await self._loop.sock_sendall(self._socket, data or b"")


def _request(head: h11.Request, body: bytes) -> Request:
    try:
        path = urlsplit(head.target.decode("ascii")).path
    except ValueError:
        raise BadRequest(400, "no path that can be understood") from None
    return Request(
        method=head.method.decode("ascii"),
        path=path,
        headers={name.decode("ascii"): value.decode("latin-1") for name, value in head.headers},
        body=body,
    )
