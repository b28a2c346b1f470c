"""One message to one target. Blocks, for a limited time; what is told names no secret."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ncclops._version import __version__
from ncclops.notify.targets import Target
from ncclops.record import answer
from ncclops.record.regular_file import read_regular

# For all of it: the name, the connection, the answer. A receiver that is up answers within one.
SEND_LIMIT_S = 10.0
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_BYTES_OF_TOKEN = 64 << 10


class NotSent(Exception):
    """A message was not taken; says why, in words that hold no secret. ``again``: a later try may
    do better."""

    def __init__(self, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.again = again


class Processes:
    """The processes of commands that run, for who reaps children of this process. Any thread."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._starting = 0
        self._lock = threading.Lock()

    @property
    def pids(self) -> set[int]:
        """Those that are known."""
        with self._lock:
            return set(self._pids)

    @property
    def is_starting(self) -> bool:
        """Whether there may be one whose number is not known yet."""
        return self._starting > 0

    @contextmanager
    def started(self, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """A process that reads from us, known for as long as it runs; its group is killed at the
        end. Raises ``OSError``."""
        nothing = subprocess.DEVNULL
        with self._lock:
            self._starting += 1
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing,
                start_new_session=True,
            )  # fmt: skip
            with self._lock:
                self._pids.add(process.pid)
        finally:
            with self._lock:
                self._starting -= 1
        try:
            yield process
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with self._lock:
                self._pids.discard(process.pid)


def send(
    target: Target,
    message: dict[str, Any],
    processes: Processes,
    limit_s: float = SEND_LIMIT_S,
) -> None:
    """Send ``message`` to ``target``, within ``limit_s``. Raises ``NotSent``."""
    body = json.dumps(message).encode()
    if target.kind == "command":
        _run(target, body + b"\n", processes, limit_s)
        return
    connections: list[http.client.HTTPConnection] = []
    try:
        # In a thread that is not waited for: a name server, or a receiver that answers a byte a
        # minute, may keep it for longer than any limit of a socket.
        answer.within(limit_s, lambda: _post(target, body, limit_s, connections))
    except TimeoutError:
        for connection in connections:
            _end(connection)
        raise NotSent(f"no answer within {limit_s:.2g} s", again=True) from None


def _end(connection: http.client.HTTPConnection) -> None:
    """Have the thread that waits in it end, too. A receiver that says ``100 Continue`` for ever
    would keep one at work for each message."""
    if (sock := connection.sock) is not None:
        with suppress(OSError):
            # Its end of the connection would wait for minutes, until the kernel gave it up.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.shutdown(socket.SHUT_RDWR)
        connection.close()


def _run(target: Target, body: bytes, processes: Processes, limit_s: float) -> None:
    try:
        with processes.started(target.command) as process:
            with suppress(BrokenPipeError):  # it need not read
                process.communicate(body, timeout=limit_s)
            code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise NotSent(f"the command has not ended within {limit_s:.2g} s", again=False) from None
    except OSError as error:
        raise NotSent(f"the command cannot be started: {error.strerror}", again=False) from None
    if code:
        raise NotSent(f"the command exited with {code}", again=False)


def _post(
    target: Target, body: bytes, limit_s: float, connections: list[http.client.HTTPConnection]
) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": f"ncclops/{__version__}"}
    try:
        token = _token(target)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(target.url, data=body, headers=headers, method="POST")
        with _opener(target, connections).open(request, timeout=limit_s):
            return
    except urllib.error.HTTPError as error:
        error.close()
        why = ", a redirect, which is not followed: give the address that it leads to"
        why = why if 300 <= error.code < 400 else ""
        raise NotSent(f"HTTP {error.code}{why}", again=error.code in _TRY_AGAIN) from None
    except urllib.error.URLError as error:
        raise NotSent(_words(error.reason), again=not _is_lasting(error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        # Whatever else a library says may quote the address.
        raise NotSent(_words(error), again=isinstance(error, OSError)) from None


def _token(target: Target) -> str:
    if target.token_file is not None:
        return read_regular(Path(target.token_file), _MOST_BYTES_OF_TOKEN).decode().strip()
    return target.key if target.kind == "json" else ""


class _Handler(urllib.request.AbstractHTTPHandler):
    """Of HTTP and HTTPS, and keeps its connections in ``opened``."""

    def __init__(
        self, context: ssl.SSLContext | None, opened: list[http.client.HTTPConnection]
    ) -> None:
        super().__init__()
        self._tls, self._opened = context, opened

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(req, http.client.HTTPConnection)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(req, partial(http.client.HTTPSConnection, context=self._tls))

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def _open(
        self, req: urllib.request.Request, kind: Callable[..., http.client.HTTPConnection]
    ) -> http.client.HTTPResponse:
        def connection(host: str, /, **options: Any) -> http.client.HTTPConnection:
            self._opened.append(made := kind(host, **options))
            return made

        return self.do_open(connection, req)


def _opener(
    target: Target, connections: list[http.client.HTTPConnection]
) -> urllib.request.OpenerDirector:
    """Without redirects: a message goes where it was meant to go, or nowhere."""
    opener = urllib.request.OpenerDirector()
    context = None
    if target.url.startswith("https:"):
        context = ssl.create_default_context(cafile=target.ca_file)
    for handler in (
        urllib.request.ProxyHandler(),
        _Handler(context, connections),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _is_lasting(reason: object) -> bool:
    return isinstance(reason, ssl.SSLCertVerificationError)


def _words(reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"the certificate is not accepted: {reason.verify_message}"
    if isinstance(reason, TimeoutError):
        return os.strerror(errno.ETIMEDOUT)
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    if isinstance(reason, http.client.HTTPException):
        return f"the answer is no HTTP ({type(reason).__name__})"
    return type(reason).__name__
