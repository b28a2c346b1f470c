"""Gloo's connections are found where the kernel does not show what its threads wait in."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ncclops.restart._groups import gloo_sockets


class _Event(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 8  # as the kernel has it
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _watch(epoll: select.epoll, sock: socket.socket) -> None:
    """As Gloo registers its sockets: with the address of an object of its own."""
    event = _Event(select.EPOLLIN, 0x5615AE9834E0)
    libc = ctypes.CDLL(None, use_errno=True)
    added = libc.epoll_ctl(epoll.fileno(), 1, sock.fileno(), ctypes.byref(event))
    assert added == 0, os.strerror(ctypes.get_errno())


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """One that Gloo could have, beside one of an event loop of Python's."""
    with ExitStack() as open_:
        listener = open_.enter_context(socket.create_server(("127.0.0.1", 0)))
        callers = [
            open_.enter_context(socket.create_connection(listener.getsockname())) for _ in range(2)
        ]
        gloos, pythons = (open_.enter_context(select.epoll()) for _ in range(2))
        _watch(gloos, listener)
        _watch(gloos, callers[0])
        pythons.register(listener.fileno(), select.EPOLLIN)
        pythons.register(callers[1].fileno(), select.EPOLLIN)
        yield callers[0]


@pytest.mark.parametrize(("name", "found"), [("gloo_tcp_loop", True), ("python", False)])
def test_sockets_that_are_registered_as_gloos_are_taken_for_them_where_gloo_runs(
    name: str, found: bool, connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks whose script had called `setuid` waited for the hard timeout."""
    monkeypatch.setattr(gloo_sockets, "system_calls_are_told", lambda: False)
    monkeypatch.setattr(gloo_sockets, "system_call_words", lambda _: [])
    monkeypatch.setattr(gloo_sockets, "names_of_threads", lambda: {os.getpid(): "p", 1: name})
    handles = gloo_sockets.gloo_connections()
    inodes = [os.fstat(handle.fileno()).st_ino for handle in handles]
    for handle in handles:
        handle.close()
    assert inodes == [os.fstat(connection.fileno()).st_ino] * found
