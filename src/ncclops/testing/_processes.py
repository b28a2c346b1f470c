"""The processes of a job, found in ``/proc``; and a port for its store."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

# In the environment of what a rank starts as a fresh program, such as its monitor process.
TAG = "NCCLOPS_TESTING_RANK"


def free_port() -> int:
    """A TCP port that nothing listens on, nor will soon.

    Not one of those that the kernel hands out by itself: between our look and its use, any
    connection or group of another job could get it.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, ephemeral)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def of_rank(tag: str, rank: int, pid: int) -> set[int]:
    """The living processes of one rank: its own, what it has forked, what it has started.

    ``pid`` is that of its main process, which is the leader of its session.
    """
    return _find(f"{tag}:{rank}\0".encode(), {pid})


def of_job(tag: str, sessions: Collection[int], port: int) -> set[int]:
    """The living processes of a job whose ranks lead ``sessions``, and its store at ``port``."""
    return _find(f"{tag}:".encode(), sessions) | _listening(port)


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Signal ``pids``; one that is gone is passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def vanish(pids: Iterable[int]) -> None:
    """End ``pids`` as if at once: none acts on the end of another."""
    found = list(pids)
    send(signal.SIGSTOP, found)
    send(signal.SIGKILL, found)


def _find(tag: bytes, sessions: Collection[int]) -> set[int]:
    mark = TAG.encode() + b"=" + tag
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            if (os.getsid(pid) in sessions or mark in (entry / "environ").read_bytes()) and _lives(
                entry
            ):
                found.add(pid)
    return found


def _lives(entry: Path) -> bool:
    """Not a zombie, which its parent has yet to wait for."""
    return (entry / "stat").read_text().rpartition(") ")[2][0] not in "ZX"


def _listening(port: int) -> set[int]:
    """Who listens on ``port``: the store's server may be a fork, which bears no mark."""
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
        and connection.pid is not None
    }
