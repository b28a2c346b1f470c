"""Who listens on a port of this machine, and whether anybody is connected to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_LISTENS = "0A"  # a socket's state in /proc/net/tcp


@dataclass(frozen=True)
class Listener:
    """``pid`` is None where the process of the user ``uid`` cannot be seen."""

    pid: int | None
    uid: int


def find_listener(port: int) -> Listener | None:
    """The process that listens on the TCP port ``port``; None if there is none."""
    uid = _uid_of(port)
    if uid is None:
        return None
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid is not None
            if listens and connection.laddr and connection.laddr.port == port:
                return Listener(connection.pid, uid)
    except psutil.Error:
        pass  # the processes of others
    return Listener(None, uid)


def has_clients(pid: int, port: int) -> bool:
    """Whether another process than ``pid``, of any machine, is connected to its TCP port ``port``.

    A store's server is a client of its own.
    """
    connected = [
        connection
        for connection in psutil.net_connections("tcp")
        if connection.pid == pid and connection.status == psutil.CONN_ESTABLISHED
    ]
    own = {each.laddr for each in connected}
    return any(
        each.laddr and each.laddr.port == port and each.raddr not in own for each in connected
    )


def _uid_of(port: int) -> int | None:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                return int(fields[7])
    return None
