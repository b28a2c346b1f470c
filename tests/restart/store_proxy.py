"""A TCP proxy before a store, whose connections a test breaks in the ways in which networks do.

A process of its own: ``python store_proxy.py PORT``, which takes its orders from stdin.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import subprocess
import sys
import time

_DEADLINE_S = 60


class StoreProxy:
    """Forwards to ``port`` of this host until an order says otherwise; ``address`` is its own."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._answer()

    def order(self, what: str) -> None:
        """One of the methods of ``_Forwarder`` whose names have no underscore."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """May be called again."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class _Forwarder:
    def __init__(self, port: int) -> None:
        self._port = port
        self._others: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._swallows_new = False
        self._kept: list[socket.socket] = []
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        say("127.0.0.1:%d" % self._listener.getsockname()[1])  # noqa: UP031 - short

    def reset(self) -> None:
        """Break all connections there are; new ones work."""
        for sock in list(self._others):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._close(sock)

    def refuse(self) -> None:
        """Break all connections, and refuse new ones."""
        self._selector.unregister(self._listener)
        self._listener.close()
        self.reset()

    def swallow(self) -> None:
        """Take what comes on the present connections, and pass nothing on: their path is lost."""
        for sock in self._others:
            self._selector.unregister(sock)
        self._kept += self._others
        self._others.clear()

    def swallow_all(self) -> None:
        """Likewise on new ones."""
        self.swallow()
        self._swallows_new = True

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == sys.stdin.fileno():
                    if not (order := sys.stdin.readline().strip()):
                        return
                    getattr(self, order)()
                    say("done")
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._others:
                    self._pump(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._swallows_new:
            self._kept.append(client)
            return
        server = self._reach_server()
        self._others |= {client: server, server: client}
        for sock in (client, server):
            self._selector.register(sock, selectors.EVENT_READ)

    def _reach_server(self) -> socket.socket:
        end = time.monotonic() + _DEADLINE_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.01)  # rank 0 starts the server when it comes

    def _pump(self, source: socket.socket) -> None:
        try:
            data = source.recv(65536)
            self._others[source].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._close(self._others[source])
            self._close(source)

    def _close(self, sock: socket.socket) -> None:
        self._others.pop(sock, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _Forwarder(int(sys.argv[1])).run()
