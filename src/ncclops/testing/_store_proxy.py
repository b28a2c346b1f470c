"""A store on a host of its own, and a TCP proxy for each rank in front of it.

What goes wrong between a rank and the store goes wrong on a real connection: it is reset, refused
or silent, or its bytes come late. Runs in a thread of the harness.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ncclops.testing.errors import HarnessError

_CHUNK = 1 << 16
_STARTED_WITHIN_S = 60.0
# closing with this resets the connection
_LINGER_NOT = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Connection:
    """One of a rank, through the proxy. ``silent``: nothing is passed on any more."""

    ends: tuple[asyncio.StreamWriter, ...]
    silent: bool = False

    def reset(self) -> None:
        for end in self.ends:
            sock: socket.socket = end.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            end.transport.abort()


class StoreProxies:
    """A proxy for each of ``ranks`` in front of the store at ``port`` of this host.

    ``addresses`` are those at which the ranks reach it. All methods may be called from any thread.
    """

    def __init__(self, ranks: Iterable[int], port: int) -> None:
        self._port = port
        self._listeners = {rank: socket.create_server(("127.0.0.1", 0)) for rank in ranks}
        self.addresses = {
            rank: f"127.0.0.1:{listener.getsockname()[1]}"
            for rank, listener in self._listeners.items()
        }
        self._servers: dict[int, asyncio.Server] = {}
        self._connections: dict[int, set[_Connection]] = defaultdict(set)
        self._silent: set[int] = set()
        self._delay_s = 0.0
        self._open = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ncclops-store-proxy", daemon=True)
        self._thread.start()

    def lose_connections(self, rank: int, *, silent: bool = False) -> None:
        """Reset all connections between ``rank`` and the store; it may connect again.

        With ``silent`` they stay, and nothing is passed on in either direction any more, as where a
        firewall has forgotten them.
        """
        self._do(self._lose(rank, silent))

    def cut_off(self, rank: int, *, silent: bool = False) -> None:
        """Likewise, and for good: new connections are refused, or silent as well."""
        self._do(self._cut_off(rank, silent))

    def slow_down(self, delay: timedelta, duration: timedelta) -> None:
        """For ``duration``, all that is sent either way is passed on ``delay`` later."""
        self._do(self._slow_down(delay.total_seconds(), duration.total_seconds()))

    def pause(self, duration: timedelta) -> None:
        """For ``duration``, nothing is passed on; then all of it is."""
        self._do(self._pause(duration.total_seconds()))

    def close(self) -> None:
        """End the proxies, and with them all connections. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._open.set()
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        for listener in self._listeners.values():
            listener.close()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _listen(self) -> None:
        for rank, listener in self._listeners.items():

            async def connect(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rank: int = rank
            ) -> None:
                # At the end of the loop; Python up to 3.11 prints a traceback of a cancelled one.
                with contextlib.suppress(asyncio.CancelledError):
                    await self._connect(rank, reader, writer)

            self._servers[rank] = await asyncio.start_server(connect, sock=listener)

    async def _connect(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            from_store, to_store = await self._reach_store()
        except OSError:
            writer.close()
            return
        connection = _Connection((writer, to_store), silent=rank in self._silent)
        self._connections[rank].add(connection)
        try:
            ways = [
                self._pass_on(connection, reader, to_store),
                self._pass_on(connection, from_store, writer),
            ]
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        finally:
            self._connections[rank].discard(connection)
            for end in connection.ends:
                end.close()

    async def _reach_store(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        end = time.monotonic() + _STARTED_WITHIN_S
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(0.01)  # the rank that serves it may come later

    async def _pass_on(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._open.wait()
                if not connection.silent:
                    writer.write(data)
                    await writer.drain()
        if connection.silent:  # the other end does not learn that this one has closed either
            await self._loop.create_future()

    async def _lose(self, rank: int, silent: bool) -> None:
        for connection in list(self._connections[rank]):
            connection.silent = silent
            if not silent:
                connection.reset()

    async def _cut_off(self, rank: int, silent: bool) -> None:
        if silent:
            self._silent.add(rank)
        else:
            self._servers[rank].close()
        await self._lose(rank, silent)

    async def _slow_down(self, delay_s: float, duration_s: float) -> None:
        self._delay_s = delay_s
        self._loop.call_later(duration_s, setattr, self, "_delay_s", 0.0)

    async def _pause(self, duration_s: float) -> None:
        self._open.clear()
        self._loop.call_later(duration_s, self._open.set)


class ProxiedStore(StoreProxies):
    """A store's server as a process, behind a proxy for each of ``ranks``.

    Raises ``HarnessError`` if the server does not start.
    """

    def __init__(self, ranks: Iterable[int], log: Path) -> None:
        self._server, port = _start_server(log)
        super().__init__(ranks, port)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._server.pid

    def close(self) -> None:
        """End the server and the proxies."""
        super().close()
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def _start_server(log: Path) -> tuple[subprocess.Popen[bytes], int]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with log.open("ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "ncclops.restart.store_server", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    assert server.stdout is not None
    timer = threading.Timer(_STARTED_WITHIN_S, server.kill)
    timer.start()
    with server.stdout as announced:
        line = announced.readline().decode().strip()
    timer.cancel()
    if not line:
        server.kill()
        server.wait()
        raise HarnessError(f"the store's server did not start: see {log}")
    return server, int(line.rpartition(":")[2])
