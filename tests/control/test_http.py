"""One HTTP connection: whatever a client sends, or does not, everybody else is answered."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.control import http
from ncclops.control.http import Limits, Pace, Request, Response, serve
from tests.conftest import LIMIT_S

GOOD = b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b'POST /control HTTP/1.1\r\nHost: x\r\nContent-Length: 18\r\n\r\n{"action": "stop"}'


class Server:
    """``http.serve`` in a thread; answers each request with its own method, path and body."""

    def __init__(self, limits: Limits) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._address = self._listener.getsockname()
        self.failures: list[dict[str, object]] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self._thread = threading.Thread(target=self._run, args=(limits,))
        self._thread.start()

    def _run(self, limits: Limits) -> None:
        self._task = self._loop.create_task(serve(self._listener, self._answer, limits))
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(self._end_connections())
        self._loop.close()

    @staticmethod
    async def _answer(request: Request) -> Response:
        if request.path == "/defect":
            raise KeyError("a defect")
        if request.path == "/large":  # more than fits into the buffers of a socket
            return Response(200, bytes(16 << 20))
        return Response(200, f"{request.method} {request.path} ".encode() + request.body)

    @staticmethod
    async def _end_connections() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=LIMIT_S)

    def send(self, data: bytes, *, end: bool = True) -> bytes:
        """Send ``data`` on a separate connection; everything that comes back until it closes."""
        with closing(self.connect()) as client:
            with suppress(OSError):  # it may have seen enough and closed
                client.sendall(data)
                if end:
                    client.shutdown(socket.SHUT_WR)
            return read_all(client)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(LIMIT_S)
        self._listener.close()


def read_all(client: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while data := client.recv(1 << 16):
            received += data
    return received


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(Limits())
    yield server
    server.close()
    assert server.failures == []


@pytest.fixture(scope="module")
def crowded() -> Iterator[Server]:
    limits = Limits(request_s=600, response_s=600, connections=4, requests_per_s=0.01, burst=40)
    server = Server(limits)
    yield server
    server.close()
    assert server.failures == []


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    """Delays no request, so that tests do not wait."""
    server = Server(Limits(request_s=0.3, response_s=0.3, connections=4))
    yield server
    server.close()
    assert server.failures == []


def test_requests_follow_each_other_on_one_connection(server: Server) -> None:
    answers = server.send(GOOD * 3)
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert answers.endswith(b"GET /status ")


@pytest.mark.slow  # takes seconds
def test_a_thousand_requests_at_once_on_one_connection(server: Server) -> None:
    received: list[bytes] = []
    with closing(server.connect()) as client:
        reader = threading.Thread(target=lambda: received.append(read_all(client)))
        reader.start()
        client.sendall(GOOD * 1000)
        client.shutdown(socket.SHUT_WR)
        reader.join(LIMIT_S)
    assert received[0].count(b"HTTP/1.1 200 OK") == 1000


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/status?verbose=1", b"/status"),
        (b"http://anywhere/status", b"/status"),
        (b"//evil/status", b"/status"),
        (b"*", b"*"),
    ],
)
def test_what_is_asked_for_is_the_path(server: Server, target: bytes, path: bytes) -> None:
    answer = server.send(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.endswith(b"GET " + path + b" ")


def test_a_handler_that_fails_is_one_request_s_matter(server: Server) -> None:
    answers = server.send(GOOD.replace(b"/status", b"/defect") + GOOD)
    assert answers.startswith(b"HTTP/1.1 500 ")
    assert answers.endswith(b"GET /status ")


def test_a_body_may_come_in_pieces(server: Server) -> None:
    chunked = b"POST /control HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert server.send(chunked + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n").endswith(b"/control abcde")


def test_a_client_that_expects_100_continue_gets_it(server: Server) -> None:
    with closing(server.connect()) as client:
        client.sendall(POST.replace(b"Host: x", b"Host: x\r\nExpect: 100-continue")[:-18])
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 100")
        client.sendall(b'{"action": "stop"}')
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET /status\r\n\r\n", b"400"),
        (b"hello\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),  # a TLS handshake
        (b"GET /status HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"GET /status HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"400"),
        (b"GET /sta\x00tus HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /st\xffatus HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /status HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (
            b"GET /status HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"400",
        ),
        (b"GET /status HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"431"),
        (b"GET /status HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET /status HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 9_000 + b"\r\n", b"431"),
        (b"G" * 1_000_000, b"4"),
        (
            b"POST /control HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70_000,
            b"413",
        ),
        (
            b"POST /control HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"ffff\r\n"
            + b"x" * 0xFFFF
            + b"\r\n"
            + b"ffff\r\n"
            + b"x" * 0xFFFF,
            b"413",
        ),
        (  # which takes the server longer than a whole head
            b"POST /control HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"1\r\nx\r\n" * 300
            + b"0\r\n\r\n",
            b"413",
        ),
        (
            b"POST /control HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"400",
        ),
    ],
)
def test_a_request_that_is_none_is_refused(server: Server, data: bytes, code: bytes) -> None:
    answer = server.send(data)
    # A connection that is closed over unread bytes may take the answer with it.
    assert answer.startswith(b"HTTP/1.1 " + code) or (answer == b"" and len(data) > 10_000)
    assert server.send(GOOD).startswith(b"HTTP/1.1 200 OK")


def test_a_huge_body_is_not_even_read(server: Server) -> None:
    announced = b"POST /control HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
    with closing(server.connect()) as client, suppress(ConnectionError):
        client.sendall(announced)
        for _ in range(1000):
            client.sendall(b"x" * (1 << 16))
        pytest.fail("65 MB were taken")


@pytest.mark.parametrize("cut", range(0, len(POST), 7))
def test_a_request_that_breaks_off_ends_its_connection_alone(server: Server, cut: int) -> None:
    answer = server.send(POST[:cut])
    assert b"200" not in answer[:20]
    assert server.send(GOOD).startswith(b"HTTP/1.1 200 OK")


def test_a_connection_reset_by_a_client_affects_no_other(server: Server) -> None:
    for sent in (b"", GOOD[:10], GOOD, GOOD * 50):
        with closing(server.connect()) as client:
            client.sendall(sent)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert server.send(GOOD).startswith(b"HTTP/1.1 200 OK")


def test_clients_that_never_come_to_an_end_are_sent_away(hasty: Server) -> None:
    """More of them than there are places: others still get their turn."""
    for beginning in (b"", b"G", GOOD[:-2], POST[:-1]):
        slow = [hasty.connect() for _ in range(8)]
        for client in slow:
            with suppress(OSError):  # on a busy machine its time may be over
                client.sendall(beginning)
        assert any(hasty.send(GOOD).startswith(b"HTTP/1.1 200 OK") for _ in range(20))
        for client in slow:
            answer = read_all(client)
            assert answer == b"" or (beginning and answer.startswith(b"HTTP/1.1 408"))
            client.close()


def test_a_byte_now_and_then_buys_no_time(hasty: Server) -> None:
    with closing(hasty.connect()) as client:
        client.settimeout(0.05)
        answer, sent = b"", 0
        while not answer:
            with suppress(TimeoutError):
                client.sendall(GOOD[sent % 4 : sent % 4 + 1])
                sent += 1
                answer = client.recv(1 << 16)
    assert answer.startswith((b"HTTP/1.1 408", b"HTTP/1.1 400"))


def test_a_client_that_does_not_read_its_answers_is_disconnected(hasty: Server) -> None:
    stuck = [hasty.connect() for _ in range(4)]
    for client in stuck:
        client.sendall(GOOD.replace(b"/status", b"/large"))
    assert any(hasty.send(GOOD).startswith(b"HTTP/1.1 200 OK") for _ in range(20))
    for client in stuck:
        client.close()


def test_a_client_whose_time_is_over_just_when_its_place_is_wanted_ends_no_server() -> None:
    async def run() -> None:
        leaves = asyncio.Event()
        client = SimpleNamespace(awaited=None, awaited_since=0.0)

        async def on_its_way_out() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.0) as client.awaited:
                    try:
                        await asyncio.Event().wait()
                    finally:
                        await leaves.wait()

        task = asyncio.create_task(on_its_way_out())
        while client.awaited is None or not client.awaited.expired():
            await asyncio.sleep(0)
        await http._one_ends({task: cast("http._Connection", client)}, 0.0)
        leaves.set()
        await task

    asyncio.run(run())


def test_silent_clients_keep_nobody_out(crowded: Server) -> None:
    """They have ten minutes, unless others want their places; and take nobody's turn."""
    slow = [crowded.connect() for _ in range(64)]
    for client, beginning in zip(
        slow, itertools.cycle((b"", b"G", GOOD[:-2], POST[:-1])), strict=False
    ):
        client.sendall(beginning)
    for _ in range(20):
        assert crowded.send(GOOD).startswith(b"HTTP/1.1 200 OK")
    for client in slow:
        client.close()


def test_clients_that_ask_without_end_keep_nobody_out(crowded: Server) -> None:
    """They would take all turns: each has one while others want its place."""
    busy = [crowded.connect() for _ in range(6)]
    for client in busy:
        client.sendall(GOOD * 100)
    assert crowded.send(GOOD).startswith(b"HTTP/1.1 200 OK")
    for client in busy:
        client.close()


def test_clients_that_take_no_answer_keep_nobody_out(crowded: Server) -> None:
    stuck = [crowded.connect() for _ in range(4)]
    for client in stuck:
        client.sendall(GOOD.replace(b"/status", b"/large"))
    assert crowded.send(GOOD).startswith(b"HTTP/1.1 200 OK")
    for client in stuck:
        client.close()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (
            b"POST /control HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n" + b"x" * 500_000,
            b"413",
        ),
        (b"GET /status HTTP/1.1\r\nHost: x\r\n" + b"X-Long: " + b"x" * 500_000, b"431"),
    ],
)
def test_a_refusal_reaches_a_client_that_is_still_sending(
    server: Server, data: bytes, code: bytes
) -> None:
    for _ in range(20):
        assert server.send(data, end=False)[9:12] == code


def test_more_clients_than_places_wait_their_turn(hasty: Server) -> None:
    clients = [hasty.connect() for _ in range(100)]
    for client in clients:
        client.sendall(GOOD.replace(b"Host: x", b"Host: x\r\nConnection: close"))
    assert all(read_all(client).startswith(b"HTTP/1.1 200 OK") for client in clients)
    for client in clients:
        client.close()


PIECES = """GET POST /control /status HTTP/1.1 HTTP/1.0 Host: Content-Length: Transfer-Encoding:
chunked 5 0 abcde Authorization: Bearer Expect: 100-continue Upgrade: Connection: keep-alive"""
pieces = st.sampled_from([piece.encode() for piece in PIECES.split()])
breaks = st.sampled_from([b" ", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\x00", b":", b"\t"])


@settings(max_examples=150)
@given(st.lists(pieces | breaks | st.binary(max_size=20), max_size=30).map(b"".join))
def test_fuzzed_requests_are_answered_or_refused(server: Server, data: bytes) -> None:
    answer = server.send(data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500" not in answer
    assert server.send(GOOD).startswith(b"HTTP/1.1 200 OK")


def test_mutated_requests_are_answered_or_refused(server: Server) -> None:
    chance = random.Random(6)
    for _ in range(300):
        data = bytearray(chance.choice([GOOD, POST]))
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        answer = server.send(bytes(data))
        assert answer == b"" or answer.startswith(b"HTTP/1.1 "), bytes(data)
    assert server.send(GOOD).startswith(b"HTTP/1.1 200 OK")


def test_requests_beyond_the_pace_wait_for_their_turn() -> None:
    pace = Pace(Limits(requests_per_s=4, burst=2))
    together = pytest.approx([0, 0, 0.3, 0.5, 0.8, 1.0])
    assert [pace.take_turn(100.0) for _ in range(6)] == together
    assert pace.take_turn(100.5) == pytest.approx(0.8)
    assert [pace.take_turn(200.0) for _ in range(3)] == pytest.approx([0, 0, 0.3])
