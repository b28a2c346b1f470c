"""Finding and shutting down Gloo's TCP connections, which nothing else can abort.

Gloo's ``abort()`` and ``shutdown()`` do nothing for an operation that is under way (torch 2.13),
so a rank blocked in a collective would wait for the group's timeout. Its connections belong to
this process, however, and once shut down they fail every operation on them at once.

They have to be shut down *for reading only*, and not closed before every rank has done the same.
Gloo takes the end of a stream for a failure and wakes all that wait; but a send that it
could not write, because the stream was shut down for writing or reset by a peer that closed it,
it leaves in a queue whose waiters it never wakes (``Pair::write`` and ``Pair::signalException``, up
to torch 2.13): they wait for the group's timeout. So we keep a handle on each connection until
``release_gloo_connections``: the connection then stays open when Gloo closes its own descriptor,
and no rank sees another one's end before it has shut down its own.

Which sockets are Gloo's? Each Gloo device has a thread that waits in an epoll instance in which
it has registered its listening socket and all its connections. The kernel shows which epoll
instance a thread waits in (``/proc/self/task/<id>/syscall``) and what is registered in it
(``/proc/self/fdinfo``). Newer versions of torch name the thread (``gloo_tcp_loop``). Older ones do
not; then the thread must have the name of the process itself (other libraries name theirs), the
sockets must be registered with *pointers* as user data, and one of them must listen (libuv, as in
the store's server, and Python register the descriptor's number).
A user's own connections are not touched.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from ncclops.restart._interrupt.threads import (
    names_of_threads,
    system_call_words,
    system_calls_are_told,
)
from ncclops.restart._process import duplicate_socket

_FDS = Path("/proc/self/fd")
_FDINFO = Path("/proc/self/fdinfo")
_THREAD_NAME = "gloo_tcp_loop"
_EPOLL = "anon_inode:[eventpoll]"

# Numbers of epoll_wait, epoll_pwait and epoll_pwait2, whose first argument is the instance.
_EPOLL_WAITS = {"x86_64": {232, 281, 441}, "aarch64": {22, 441}}.get(platform.machine(), set())

# A Gloo thread that is busy is not waiting; it will be within a moment.
_LOOKS = 20
# torch 2.5 does not name them: then any other thread is a candidate, and most never wait like that.
_LOOKS_UNNAMED = 4
_BETWEEN_LOOKS_S = 0.0005


# Our handles on connections that were shut down.
_kept: list[socket.socket] = []
# Epoll instances of groups that outlive a fault: nothing here touches them, unless asked by name.
left_alone: set[int | None] = set()


def shut_down_gloo_connections(epolls: Collection[int] | None = None) -> int:
    """Shut down the Gloo connections of this process; returns how many there were.

    ``epolls`` as in ``gloo_connections``. The descriptors stay open: they are Gloo's to close. The
    peers notice only when ``release_gloo_connections`` is called.
    """
    shut_down = _shut_down_for_reading(epolls)
    _kept.extend(shut_down)
    return len(shut_down)


def _shut_down_for_reading(epolls: Collection[int] | None = None) -> list[socket.socket]:
    """Our own handles on Gloo connections of this process, which Gloo takes for ended now."""
    done = []
    for sock in gloo_connections(epolls):
        if _shut_down(sock, socket.SHUT_RD):
            done.append(sock)
        else:
            sock.close()
    return done


def gloo_connections(epolls: Collection[int] | None = None) -> list[socket.socket]:
    """Our own handles on the Gloo connections of this process; to be closed.

    ``epolls`` are the instances that they are registered in; ``None``: all but ``left_alone``.
    """
    found = []
    for epoll in _gloo_epolls() - left_alone if epolls is None else epolls:
        sockets = _tcp_sockets(_registered_with_pointer(epoll))
        are_gloos = any(map(_listens, sockets))
        for sock in sockets:
            if are_gloos and not _listens(sock):
                found.append(sock)
            else:
                sock.close()
    return found


def release_gloo_connections() -> None:
    """Close our handles on the connections; all ranks have shut down theirs by now."""
    while _kept:
        _kept.pop().close()


def close_gloo_connections() -> None:
    """Have every Gloo connection of this process closed, which the peers notice.

    For a rank that is done with its groups: an operation with one that is not fails there. What
    this rank has sent arrives before. Closed alone, a connection would stay open for as long as a
    process has it that the script has forked, such as a data loader's.
    """
    for sock in _shut_down_for_reading():
        with sock:
            _shut_down(sock, socket.SHUT_WR)


def gloo_threads() -> set[int]:
    """The threads of Gloo's devices; none where this torch does not name them."""
    return {task for task, name in names_of_threads().items() if name == _THREAD_NAME}


def epoll_of(task: int) -> int | None:
    """The epoll instance of one of ``gloo_threads``, which its group alone uses."""
    for _ in range(_LOOKS):
        if (epoll := _epoll_of(task)) is not None:
            return epoll
        time.sleep(_BETWEEN_LOOKS_S)
    return None


def answer_gloo_rendezvous(numbers: Collection[int]) -> int:
    """End the waits of Gloo groups being made for connections with these ``numbers``.

    While a group is made, a pair that is to be connected by its peer has no socket yet that could
    be shut down. A connection opens with the number of the pair (8 bytes, counted from 0 in each
    device): we connect to our own listeners in the place of each peer, and close. Pairs that
    are connected already are not affected. Returns how many listeners there were.
    """
    listeners = 0
    for epoll in _gloo_epolls() - left_alone:
        for sock in _tcp_sockets(_registered_with_pointer(epoll)):
            with sock, contextlib.suppress(OSError):
                if _listens(sock):
                    listeners += 1
                    _connect_as_each_peer(sock, numbers)
    return listeners


def _connect_as_each_peer(listener: socket.socket, numbers: Collection[int]) -> None:
    for number in numbers:
        with socket.socket(listener.family) as caller:
            caller.settimeout(1.0)
            caller.connect(listener.getsockname())
            caller.send(struct.pack("=q", number))


def shut_down_connections_to(
    host: str | None, port: int, keep: Collection[int]
) -> dict[tuple[int, int], tuple[str, int]]:
    """Shut down this process's connections to ``port`` of ``host``, except the inodes in ``keep``.

    ``host`` is a numeric address; ``None``: any. Returns the address of each, by its descriptor and
    inode.
    """
    done = {}
    for fd, inode in socket_inodes().items():
        for sock in _tcp_sockets([fd] if inode not in keep else []):
            with sock, contextlib.suppress(OSError, IndexError):
                there, its_port = sock.getpeername()[:2]
                is_wanted = its_port == port and (host is None or _plain(there) == _plain(host))
                if is_wanted and _shut_down(sock, socket.SHUT_RDWR):
                    done[fd, inode] = there, port
    return done


def _plain(address: str) -> str:
    """A socket of IPv6 shows an address of IPv4 in its own notation."""
    return address.removeprefix("::ffff:")


def socket_inodes() -> dict[int, int]:
    """The sockets of this process: descriptor to inode."""
    found = {}
    for fd, target in _descriptors():
        if target.startswith("socket:["):
            found[fd] = int(target[8:-1])
    return found


def handles_on(inodes: Collection[int]) -> list[socket.socket]:
    """Our own handles on the TCP sockets of this process with these inodes; to be closed."""
    fds = [fd for fd, inode in socket_inodes().items() if inode in inodes] if inodes else []
    return _tcp_sockets(fds)


def _gloo_epolls() -> set[int]:
    """The epoll instances that Gloo's threads wait in."""
    if not system_calls_are_told():
        epolls = {fd for fd, target in _descriptors() if target == _EPOLL}
        return epolls if gloo_threads() else set()
    found: set[int] = set()
    for look in range(1, _LOOKS + 1):
        names = names_of_threads()
        named = [task for task, name in names.items() if name == _THREAD_NAME]
        suspects = named or [task for task, name in names.items() if name == names[os.getpid()]]
        waits = {task: _epoll_of(task) for task in suspects}
        found |= {epoll for epoll in waits.values() if epoll is not None}
        if None not in waits.values() if named else look == _LOOKS_UNNAMED:
            break
        time.sleep(_BETWEEN_LOOKS_S)  # a thread's return to its wait announces nothing
    return found


def _epoll_of(task: int) -> int | None:
    """The epoll instance that a thread waits in right now."""
    words = system_call_words(task)
    return words[1] if len(words) > 1 and words[0] in _EPOLL_WAITS else None


def _descriptors() -> Iterator[tuple[int, str]]:
    for entry in os.scandir(_FDS):
        with contextlib.suppress(OSError):
            yield int(entry.name), os.readlink(entry.path)  # noqa: PTH115 - hot


def _registered_with_pointer(epoll: int) -> list[int]:
    """The descriptors that an epoll instance watches with a pointer as user data."""
    with contextlib.suppress(OSError):
        lines = (_FDINFO / str(epoll)).read_text().splitlines()
        return [fd for line in lines if (fd := _pointer_registration(line)) is not None]
    return []


def _pointer_registration(line: str) -> int | None:
    """The descriptor of a ``tfd:`` line of an epoll's fdinfo, if its user data is a pointer."""
    # tfd:       24 events:       19 data:     5615ae9834e0  pos:0 ino:... sdev:...
    words = line.split()
    if len(words) < 6 or words[0] != "tfd:":
        return None
    fd, data = int(words[1]), int(words[5], 16)
    # libuv and Python store the number in the low half; the high half may be left as it was
    return fd if data & 0xFFFFFFFF != fd else None


def _tcp_sockets(fds: list[int]) -> list[socket.socket]:
    """Our own handles on those of ``fds`` that are TCP sockets."""
    found = []
    for fd in fds:
        sock = duplicate_socket(fd)
        if sock is None:
            continue
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            found.append(sock)
        else:
            sock.close()
    return found


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut_down(sock: socket.socket, how: int) -> bool:
    try:
        sock.shutdown(how)
    except OSError:  # not connected, or closed by the other side already
        return False
    return True
