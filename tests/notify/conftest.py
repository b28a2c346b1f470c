"""A receiver of notifications: a real HTTP server on the loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import pytest

LIMIT_S = 30.0


@dataclass
class Received:
    path: str
    authorization: str | None
    body: dict[str, Any]


@dataclass
class Receiver:
    """``codes`` are what it answers, by the path, one after the other; else 200. ``silent`` is set
    for it to answer nothing until ``go_on`` is."""

    port: int = 0
    got: Queue[Received] = field(default_factory=Queue)
    codes: dict[str, list[int]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    go_on: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def next(self) -> Received:
        return self.got.get(timeout=LIMIT_S)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    state = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.got.put(Received(self.path, self.headers.get("Authorization"), body))
            if self.path in state.silent:
                state.go_on.wait(LIMIT_S)
            codes = state.codes.get(self.path, [])
            code = codes.pop(0) if codes else 200
            self.send_response(code)
            if code in (301, 302, 307):
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            with suppress(ConnectionError):  # the sender has not waited
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield state
    state.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join(LIMIT_S)
