"""Snapshots between two processes' sockets: what arrives is what was sent, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ncclops.restart.snapshot import PeerError
from ncclops.restart.snapshot._agreement import Agreement
from ncclops.restart.snapshot._background import Background
from ncclops.restart.snapshot._blobs import Blob
from ncclops.restart.snapshot._memory import Memory
from ncclops.restart.snapshot._planning import Fetch, Moment, Source
from ncclops.restart.snapshot._server import _MOST_UNGREETED, Server
from ncclops.restart.snapshot._wire import _MAGIC, TOKEN_CHARACTERS, Address, Connection

from .test_state import blob_of

WITHIN_S = 30.0


def sealed(step: int, content: int = 1, megabytes: int = 1) -> Blob:
    blob = blob_of({"t": torch.full((megabytes * 2**18,), content, dtype=torch.int32)})
    assert blob.draft is not None
    blob.label = None
    object.__setattr__(blob.draft, "step", step)
    blob.seal()
    return blob


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    made.server = Server(made)
    yield made
    made.close()


@pytest.fixture
def connection(memory: Memory) -> Iterator[Connection]:
    assert memory.server is not None
    made = Connection.to(memory.server.address, WITHIN_S)
    yield made
    made.close()


def allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_what_a_partner_keeps_comes_back_to_the_bit(memory: Memory, connection: Connection) -> None:
    blob = sealed(5, megabytes=9)
    connection.put(blob)
    assert blob.label is not None
    back = connection.get(blob.label, allocate)
    assert back.header == blob.header
    assert torch.equal(back.buffer, blob.buffer)
    assert [holding.is_copy for holding, _ in memory.holdings()] == [True]


def test_a_partner_keeps_the_last_two_in_two_buffers(
    memory: Memory, connection: Connection
) -> None:
    for step in range(1, 6):
        connection.put(sealed(step, step))
    kept = [holding.label.step for holding, _ in memory.holdings()]
    assert kept == [5, 4]
    assert memory.nbytes == (0, 2 * 2**20)
    memory.keep_copies_of(Moment(1, 4), ())
    assert [holding.label.step for holding, _ in memory.holdings()] == [4]


def test_what_is_not_there_is_said(connection: Connection) -> None:
    label = sealed(5).label
    assert label is not None
    with pytest.raises(PeerError, match="no such snapshot of step 5"):
        connection.get(label, allocate)


def test_damage_on_the_way_is_found_and_nothing_is_kept(
    memory: Memory, connection: Connection
) -> None:
    blob = sealed(5)
    blob.buffer[0] += 1
    with pytest.raises(PeerError, match="another checksum"):
        connection.put(blob)
    assert memory.holdings() == []


def test_damage_in_memory_is_found_by_whoever_fetches(
    memory: Memory, connection: Connection
) -> None:
    blob = sealed(5)
    connection.put(blob)
    ((_, kept),) = memory.holdings()
    kept.buffer[3] += 1
    assert blob.label is not None
    with pytest.raises(PeerError, match="another checksum"):
        connection.get(blob.label, allocate)


def test_a_partner_without_room_says_so_and_keeps_what_it_has(
    memory: Memory, connection: Connection
) -> None:
    memory.most_copied = 2**20
    first = sealed(1)
    connection.put(first)
    with pytest.raises(PeerError, match="does not fit: 1048576 of 1048576 bytes"):
        connection.put(sealed(2, megabytes=2))
    assert first.label is not None
    assert connection.get(first.label, allocate).label == first.label, "the connection goes on"
    assert [holding.label.step for holding, _ in memory.holdings()] == [1]


def raw(memory: Memory, greeting: bytes) -> socket.socket:
    assert memory.server is not None
    address = memory.server.address
    sock = socket.create_connection((address.host, address.port), WITHIN_S)
    sock.sendall(greeting)
    return sock


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(200), _MAGIC + b"0" * TOKEN_CHARACTERS],
)
def test_who_does_not_know_the_token_gets_no_answer(memory: Memory, greeting: bytes) -> None:
    with raw(memory, greeting) as sock, contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    assert memory.holdings() == []


def test_a_crowd_that_says_nothing_keeps_no_rank_out(memory: Memory) -> None:
    assert memory.server is not None
    with contextlib.ExitStack() as crowd:
        for _ in range(_MOST_UNGREETED + 8):
            crowd.enter_context(raw(memory, b""))
        Connection.to(memory.server.address, WITHIN_S).close()


def test_a_holder_that_sends_a_byte_now_and_then_is_given_up(memory: Memory) -> None:
    label = sealed(5).label
    assert label is not None

    def drip() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            sock.sendall(b'ok\n{"header_bytes": 9999}\n')
            while True:
                sock.sendall(b"x")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        holder = threading.Thread(target=drip)
        holder.start()
        address = Address("127.0.0.1", listener.getsockname()[1], "0" * TOKEN_CHARACTERS)
        background = cast("Background", SimpleNamespace(connections=set()))
        agreement = Agreement(background, memory, "", 1, timedelta(seconds=1))
        with pytest.raises(PeerError):
            agreement._fetch_one(Fetch(label, 1, Source.PARTNER), address)
        holder.join()


@pytest.mark.parametrize(
    "request_",
    [
        b"x" * 5000,
        b"[]\n",
        b"{\n",
        b'{"put": 3}\n',
        b'{"get": {"unit": "own"}}\n',
        b'{"put": {}, "header_bytes": 1}\n',
        b"[" * 4000 + b"\n",
    ],
)
def test_requests_that_are_none_end_the_connection(memory: Memory, request_: bytes) -> None:
    assert memory.server is not None
    with raw(memory, _MAGIC + memory.server.address.token.encode()) as sock:
        assert sock.recv(3) == b"ok\n"
        sock.sendall(request_)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("nbytes", "header_bytes"), [(2**62, 10), (10, 2**40), (10, -1), (10, "10"), (-5, 10)]
)
def test_sizes_are_checked_before_anything_is_allocated(
    memory: Memory, nbytes: int, header_bytes: object
) -> None:
    assert memory.server is not None
    label = sealed(5).label
    assert label is not None
    request = {"put": label.as_json() | {"nbytes": nbytes}, "header_bytes": header_bytes}
    with raw(memory, _MAGIC + memory.server.address.token.encode()) as sock:
        assert sock.recv(3) == b"ok\n"
        sock.sendall(json.dumps(request).encode() + b"\n")
        sock.shutdown(socket.SHUT_WR)
        answer = bytearray()
        try:
            while piece := sock.recv(1000):
                answer += piece
        except ConnectionResetError:
            pass
    assert b"true" not in answer
    assert memory.nbytes == (0, 0)
