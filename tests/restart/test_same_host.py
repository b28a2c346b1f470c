"""Which connections lead to a store's host: by address, in either notation, or by name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from ncclops.restart._groups.gloo_sockets import shut_down_connections_to
from ncclops.restart._store.connections import _addresses_of


@pytest.fixture
def server() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def _is_shut_down(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("notation", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_a_host_is_the_same_in_both_notations_and_others_are_not(
    server: dist.TCPStore, notation: str
) -> None:
    with ExitStack() as stack:
        connect = socket.create_connection
        same = stack.enter_context(connect((notation, server.port), timeout=10))
        other = stack.enter_context(connect(("127.0.0.2", server.port), timeout=10))
        assert shut_down_connections_to("127.0.0.1", server.port, keep=())
        assert _is_shut_down(same)
        assert not _is_shut_down(other)


def test_a_store_that_is_known_by_name_is_found_by_its_addresses(server: dist.TCPStore) -> None:
    """And no other host's connection to the same port is taken for it."""
    client = dist.TCPStore("localhost", server.port, None, False, wait_for_workers=False)
    found = _addresses_of([dist.PrefixStore("inner", dist.PrefixStore("outer", client))])
    assert ("127.0.0.1", server.port) in found
    with socket.create_connection(("127.0.0.2", server.port), timeout=10) as other:
        for host, port in found:
            shut_down_connections_to(host, port, keep=())
        assert not _is_shut_down(other)
        with pytest.raises(dist.DistNetworkError):
            client.set("key", "value")
