"""Finding and shutting down Gloo's TCP connections, which nothing else can abort.

Gloo's ``abort()`` and ``shutdown()`` do nothing for an operation that is under way (torch 2.13),
so a rank blocked in a collective would wait for the group's timeout. Its connections belong to
this process, however, and once shut down they fail every operation on them at once.

Which sockets are Gloo's? Each Gloo device has a thread with an epoll instance in which it has
registered its listening socket and all its connections, with *pointers* as user data. (libuv, as
in the store's server, and Python's selectors register the descriptor's number.) The kernel
shows all of that under ``/proc/self/fdinfo``. A user's own connections are thus never touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_FDS = Path("/proc/self/fd")
_FDINFO = Path("/proc/self/fdinfo")


def shut_down_gloo_connections() -> int:
    """Shut down every Gloo connection of this process; returns how many there were.

    The descriptors stay open: they are Gloo's to close.
    """
    done = 0
    for watched in _epoll_registrations():
        sockets = list(_duplicates(watched))
        try:
            if any(map(_listens, sockets)):
                done += sum(_shut_down(sock) for sock in sockets if not _listens(sock))
        finally:
            for sock in sockets:
                sock.close()
    return done


def shut_down_connections_to(port: int, keep: set[int]) -> int:
    """Shut down this process's connections to remote ``port``, except the inodes in ``keep``."""
    done = 0
    for fd, inode in socket_inodes().items():
        if inode in keep:
            continue
        for sock in _duplicates([fd]):
            with sock, contextlib.suppress(OSError, IndexError):
                if sock.getpeername()[1] == port:
                    done += _shut_down(sock)
    return done


def socket_inodes() -> dict[int, int]:
    """The sockets of this process: descriptor to inode."""
    found = {}
    for entry in os.scandir(_FDS):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                found[int(entry.name)] = int(target[8:-1])
    return found


def _epoll_registrations() -> Iterator[list[int]]:
    """For each epoll instance of this process, the descriptors registered with a pointer."""
    for entry in os.scandir(_FDS):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path) == "anon_inode:[eventpoll]":
                lines = (_FDINFO / entry.name).read_text().splitlines()
                yield [fd for line in lines if (fd := _pointer_registration(line)) is not None]


def _pointer_registration(line: str) -> int | None:
    """The descriptor of a ``tfd:`` line of an epoll's fdinfo, if its user data is a pointer."""
    # tfd:       24 events:       19 data:     5615ae9834e0  pos:0 ino:... sdev:...
    words = line.split()
    if len(words) < 6 or words[0] != "tfd:":
        return None
    fd, data = int(words[1]), int(words[5], 16)
    # libuv and Python store the number in the low half; the high half may be left as it was
    return fd if data & 0xFFFFFFFF != fd else None


def _duplicates(fds: list[int]) -> Iterator[socket.socket]:
    """Our own handles on those of ``fds`` that are TCP sockets.

    A duplicate keeps referring to the same socket even if the number is reused meanwhile.
    """
    for fd in fds:
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=os.dup(fd))
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock
            else:
                sock.close()


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut_down(sock: socket.socket) -> bool:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected, or closed by the other side already
        return False
    return True
