"""Answers other hosts' probes, on a sample of the ports that NCCL might be given."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

from ncclops.preflight.edges import wire
from ncclops.preflight.edges.interface import scope_of, spread
from ncclops.preflight.edges.model import Place

# A connection is served for so long; the longest probe ends before.
_SERVED_FOR_S = 30.0
_BACKLOG = 1024
# Where a port is taken, the next ones are tried: so many.
_NEXT_PORTS = 16
# Of the range, one port in so many is listened on at most.
_OF_RANGE = 8


class Listener:
    """Listens from ``start`` to ``close``. ``ports`` by slot; slot 0 is the store's, 0 if taken."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.ports: tuple[int, ...] = ()
        self._servers: list[asyncio.Server] = []

    async def start(
        self, place: Place, port_range: tuple[int, int], count: int, store_port: int
    ) -> None:
        """Listen where NCCL would, on ``store_port`` and ``count`` ports of the range.

        Raises ``OSError`` where that address cannot be listened on at all.
        """
        ports = [await self._listen(place, store_port, 1)]
        low, high = port_range
        # This host's own connections need ports of the range, too.
        wanted = spread(low, high, min(count, 1 + (high - low) // _OF_RANGE))
        for number, port in enumerate(wanted):
            end = wanted[number + 1] if number + 1 < len(wanted) else port + 1
            ports.append(await self._listen(place, port, min(_NEXT_PORTS, max(1, end - port))))
        self.ports = (ports[0], *(port for port in ports[1:] if port))
        if len(self.ports) == 1:
            raise OSError(errno.EADDRINUSE, f"no free port at {place.address}")

    async def _listen(self, place: Place, first: int, tries: int) -> int:
        """The port, from ``first`` on, that is listened on; 0 if all of them are taken."""
        for port in range(first, first + tries):
            sock = socket.socket(socket.AF_INET if place.family == 4 else socket.AF_INET6)
            try:
                # As NCCL does: on the interface's own address, and on no other.
                sock.bind(sockaddr(place.address, port, place))
                sock.listen(_BACKLOG)
                sock.setblocking(False)
            except OSError as error:
                sock.close()
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise
            self._servers.append(await asyncio.start_server(self._serve, sock=sock))
            return port
        return 0

    async def close(self) -> None:
        """Stop listening; what is being served is cut."""
        for server in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled at the end of the run: Python 3.11 would print that as an error of the server.
        ended = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ended):
            async with asyncio.timeout(_SERVED_FOR_S):
                await self._answer(reader, writer)
        writer.transport.abort() if writer.is_closing() else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = wire.read_request(await reader.readexactly(wire.REQUEST_BYTES))
        if asked is None:
            return
        _, pings, size = asked
        writer.write(wire.reply(self.uid))
        for _ in range(pings):
            writer.write(await reader.readexactly(1))
        if size:
            left = size
            while left and (data := await reader.read(min(left, 1 << 16))):
                left -= len(data)
            if left:
                return
            writer.write(wire.ARRIVED)
            await writer.drain()
            writer.write(bytes(size))
        await writer.drain()
        await reader.read(1)  # until the other end has closed: then nothing of it is lost


def sockaddr(address: str, port: int, place: Place) -> tuple[str, int] | tuple[str, int, int, int]:
    """What the kernel wants; a link-local address is used on ``place``'s interface."""
    if ":" not in address:
        return address, port
    return address, port, 0, scope_of(address, place)
