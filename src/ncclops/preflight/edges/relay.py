"""A way to the meeting where this host's firewall drops what comes to some of its own ports.

The kernel takes one local port after the other for connections to one address and port: where a
rule without state drops the answers to them, trying again does not help. From other local ports it
does, and torch's store cannot be told which: so it connects to a socket here, which is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from ncclops.preflight.edges.interface import port_range, spread

_TRIED = 16
_LOOPBACK_S = 1.0
_CHUNK = 1 << 16


async def ports_that_pass(address: str, port: int, within_s: float) -> list[int]:
    """Local ports, of some spread over the kernel's range, from which ``address`` is reached."""
    return [
        local
        for local in await asyncio.gather(
            *(_passes(address, port, local, within_s) for local in spread(*port_range(), _TRIED))
        )
        if local
    ]


@contextlib.asynccontextmanager
async def relay(address: str, port: int, locals_: Sequence[int]) -> AsyncIterator[int]:
    """The port, on this host's loopback, at which ``address`` and ``port`` are reached by way of
    ``locals_``; as long as the block runs."""
    given = iter(range(1 << 16))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            first = await reader.read(_CHUNK)
            if not first:
                writer.close()  # the trial below
                return
            number = next(given)
            local = locals_[number % len(locals_)] + number // len(locals_)
            there = await asyncio.open_connection(
                address, port, local_addr=("::" if ":" in address else "0.0.0.0", local)
            )
            there[1].write(first)
            await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    for _ in range(_TRIED):  # a rule for all interfaces has the loopback's ports as well
        if await _passes("127.0.0.1", _port(server), 0, _LOOPBACK_S):
            break
        server.close()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield _port(server)
    finally:
        server.close()


def _port(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _passes(address: str, port: int, local: int, within_s: float) -> int:
    """The local port that reaches it, ``local`` or, for 0, the kernel's choice; 0 if none does."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", local))
            async with asyncio.timeout(within_s):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
            return int(sock.getsockname()[1])
        except OSError:  # a timeout is one, too
            return 0
