"""A proxy in front of a TCPStore that counts the operations, by reading the requests go by.

What each request consists of, as observed on the wire (torch 2.5 to 2.15): one byte for the
kind, then integers and texts, a text with its length before it.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections import Counter

# kind: its name and what follows; T a text, N a count of 8 bytes, (..) repeated as counted
_FORMATS = {
    0: ("validate", "4"),
    1: ("set", "TT"),
    2: ("compare_set", "TTT"),
    3: ("get", "T"),
    4: ("add", "T8"),
    5: ("check", "N(T)"),
    6: ("wait", "N(T)"),
    7: ("num_keys", ""),
    8: ("delete_key", "T"),
    9: ("append", "TT"),
    10: ("multi_get", "N(T)"),
    11: ("multi_set", "N(TT)"),
    12: ("cancel_wait", ""),
    13: ("ping", "4"),
}


class CountingProxy:
    """Listens on ``port`` and passes everything on to ``target`` on this machine."""

    def __init__(self, port: int, target: int) -> None:
        self.counts: Counter[str] = Counter()
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._stop_r, self._stop_w = socket.socketpair()
        self._selector.register(self._stop_r, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def total(self) -> int:
        """Operations so far."""
        return sum(self.counts.values())

    def close(self) -> None:
        """Stop and drop all connections."""
        self._stop_w.send(b"x")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._stop_w.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stop_r:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._pass_on(key.fileobj, *key.data)  # type: ignore[arg-type]

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(client, selectors.EVENT_READ, (server, Requests(self.counts)))
        self._selector.register(server, selectors.EVENT_READ, (client, None))

    def _pass_on(self, source: socket.socket, target: socket.socket, requests: Requests) -> None:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            for sock in (source, target):
                if sock.fileno() >= 0:
                    self._selector.unregister(sock)
                    sock.close()
            return
        if requests is not None:
            requests.feed(data)
        target.sendall(data)


class Requests:
    """Counts the requests in a stream of bytes. Raises ``ValueError`` on what it does not know."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._data = b""

    def feed(self, data: bytes) -> None:
        """More of the stream."""
        self._data += data
        while self._data:
            name, format_ = _FORMATS.get(self._data[0], ("", ""))
            if not name:
                raise ValueError(f"unknown request {self._data[0]} in {self._data[:40]!r}")
            end = _end_of(self._data, 1, format_)
            if end is None:
                return
            self._counts[name] += 1
            self._data = self._data[end:]


def _end_of(data: bytes, at: int, format_: str) -> int | None:
    """Where a request of ``format_`` that begins at ``at`` ends; ``None``: not all is there."""
    if format_.startswith("N"):
        if len(data) < at + 8:
            return None
        (count,) = struct.unpack_from("<Q", data, at)
        return _end_of(data, at + 8, format_[2:-1] * count)
    for field in format_:
        length = int(field) if field.isdigit() else 8
        if len(data) < at + length:
            return None
        if field == "T":
            length += struct.unpack_from("<Q", data, at)[0]
        at += length
    return at if at <= len(data) else None
