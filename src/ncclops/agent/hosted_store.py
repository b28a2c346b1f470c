"""A TCPStore that this node serves, in a separate process, so that it outlives every rank.

The agent binds the port and passes the listening socket to the server: so the port cannot be taken
in between, and workers may connect before the server has finished importing torch (the kernel keeps
their connections in the backlog).
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ncclops.agent.forked import ForkedProcess
from ncclops.control import holders
from ncclops.errors import NcclopsError, UsageError
from ncclops.exhausted import described
from ncclops.host.listeners import has_clients
from ncclops.process_ends import describe_exit, signal_name
from ncclops.record.regular_file import append_regular
from ncclops.record.variables import RUN_DIR

if TYPE_CHECKING:
    from ncclops.host.kept_running import KeptRunning

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_BACKLOG = 4096  # every rank of a large job may connect in the same moment
# After two minutes without an answer a host is off, or cut off: its connections end then.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
# Its kernel accepts, also where the server is slow; a lost packet is sent again after 1, 3, 7 s.
_CONNECTS_WITHIN_S = 10.0


@dataclass(frozen=True)
class StoreAddress:
    """Where workers find the store: their ``MASTER_ADDR`` and ``MASTER_PORT``."""

    host: str
    port: int

    def check(self) -> None:
        """Connect to the server there, of whichever node; raises ``NcclopsError`` if none accepts.

        For up to ten seconds.
        """
        try:
            socket.create_connection((self.host, self.port), _CONNECTS_WITHIN_S).close()
        except OSError as error:
            where = f"{self.host}:{self.port}"
            raise NcclopsError(f"the ranks' store at {where}: {described(error)}") from error


NOWHERE = StoreAddress("", 0)


class StoreForks(Protocol):
    """Where a server may be forked, as ``fork_server.ForkServer``."""

    is_ready: bool | None

    def fork_store(self, listener: int, log: int) -> int:
        """A child of this process: its PID. Raises ``OSError``."""


class StoreServer:
    """A running store server; ``process`` ends when this process closes it or ends itself."""

    def __init__(
        self, address: StoreAddress, process: subprocess.Popen[bytes] | ForkedProcess
    ) -> None:
        self.address = address
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self._kept: KeptRunning | None = None

    def keep_running(self) -> None:
        """From now on, have a server that is stopped go on. In the event loop."""
        # The launcher, which only listens, has no event loop.
        from ncclops.host.kept_running import KeptRunning

        self._kept = KeptRunning(self.process, "the store server")

    def how_it_ended(self, out_of_memory: Callable[[], str | None] = lambda: None) -> str:
        """In words, once ``pidfd`` says that it has. ``out_of_memory`` is asked after a SIGKILL
        whether the kernel has ended processes for want of memory, and says so."""
        code = self.process.wait()
        if code >= 0:
            return describe_exit(code, None)
        how = describe_exit(None, signal_name(-code))
        why = out_of_memory() if code == -signal.SIGKILL else None
        return how if why is None else f"{how} ({why})"

    def has_clients(self) -> bool:
        """Whether a process is connected, of this host or another one."""
        return has_clients(self.process.pid, self.address.port)

    def close(self) -> None:
        """End the server, which has nothing to save."""
        if self._kept is not None:
            self._kept.end()
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)


def listen(*, host: str | None, port: int) -> socket.socket:
    """A listening socket on ``port`` (0: any free one), on loopback or on all interfaces.

    ``host`` None is the one-node case: the store is not reachable from outside this machine.
    Raises ``UsageError`` when the port is taken.
    """
    if host is None:
        _require_loopback()
    try:
        if host is None:
            return socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        else:
            listener = socket.create_server(("", port), backlog=_BACKLOG)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # of what it accepts
        for option, value in _KEEPALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        return listener
    except OSError as error:
        free = "or none to have a free one picked" if host is None else "the same on all nodes"
        why = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.EADDRINUSE:
            why += holders.port_in_use(port)
        raise UsageError(
            f"cannot listen on port {port}, where the store is to be ({why}):"
            f" give another one, {free}"
        ) from error


def _require_loopback() -> None:
    """Raises ``UsageError`` where it is down, as in a new network namespace: one can listen there,
    and not connect."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, 9))  # of UDP: only looks for the way
        except OSError as error:
            raise UsageError(
                f"no way to {LOOPBACK}, where the ranks meet ({error.strerror}): is the loopback"
                " interface up (`ip link set lo up`)?"
            ) from None


def serve(
    listener: socket.socket, host: str | None, log_file: Path, forks: StoreForks | None = None
) -> StoreServer:
    """Start the server process on ``listener`` (closed here); its output goes to ``log_file``.

    Forked by ``forks`` where that can: started afresh, it takes half a second of a core.
    """
    address = StoreAddress(host or LOOPBACK, listener.getsockname()[1])
    with listener, append_regular(log_file) as output:
        if forks is not None and forks.is_ready:
            try:
                pid = forks.fork_store(listener.fileno(), output.fileno())
            except OSError as error:
                log.warning("the store server is started afresh: %s", described(error))
            else:
                return StoreServer(address, ForkedProcess(pid))
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",  # no modules from the current directory
                "-m",
                "ncclops.agent.store_server",
                str(listener.fileno()),
                str(address.port),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[listener.fileno()],
            env=os.environ | {RUN_DIR: str(log_file.parent)},  # by which `holders` knows it
            start_new_session=True,
        )
    return StoreServer(address, process)
