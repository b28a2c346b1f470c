"""Snapshots between two ranks, over plain TCP: the process groups are gone when they are needed.

A connection begins with a greeting of fixed length, which has the token of the listening rank; it
was told to the ranks of the job through the store. Until then nothing is read beyond those bytes,
and nothing allocated. Then come requests, each a line of JSON of at most ``_MOST_REQUEST_BYTES``:

========  ==============================  ========================================================
request   followed by                     answer
========  ==============================  ========================================================
``put``   after ``{"ready": true}``,      ``{"ok": true}`` once checked; where there is no room,
          header and content of a blob    or it is not intact, ``{"error": why}``
``get``   nothing                         ``{"header_bytes": n}`` and both, or ``{"error": why}``
========  ==============================  ========================================================

Both name the label, which has the size and the checksum. Sizes are checked against what the
listening rank allows before anything is allocated, and content is read as values, never executed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclops.restart.snapshot._blobs import Blob, is_intact, read_header
from ncclops.restart.snapshot._errors import PeerError
from ncclops.restart.snapshot._planning import Label

if TYPE_CHECKING:
    from torch import Tensor

_MAGIC = b"ncclops-snap-1\n"
TOKEN_CHARACTERS = 32
_GREETING_BYTES = len(_MAGIC) + TOKEN_CHARACTERS
_WELCOME = b"ok\n"
_MOST_REQUEST_BYTES = 4096
# Names, types and shapes of tensors, and plain values: some hundred bytes for each tensor.
MOST_HEADER_BYTES = 256 * 2**20
# A rank that is alive goes on within this; whoever waits has a deadline of his own besides.
SILENCE_S = 30.0
_PIECE_BYTES = 4 * 2**20


class Address(NamedTuple):
    """Where a rank listens, and the token that it asks for."""

    host: str
    port: int
    token: str


class Connection:
    """One end of a connection. One thread's; ``close`` may be called by any."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(SILENCE_S)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """End it; a thread that waits in it gets ``PeerError``."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    # --- the asking side ------------------------------------------------------------------------

    @classmethod
    def to(cls, address: Address, within_s: float) -> Connection:
        """A connection to the rank at ``address``. Raises ``PeerError``."""
        try:
            sock = socket.create_connection((address.host, address.port), within_s)
            made = cls(sock)
            made._sock.sendall(_MAGIC + address.token.encode().ljust(TOKEN_CHARACTERS))
            if made._receive(len(_WELCOME)) != _WELCOME:
                raise PeerError("another program listens there")
        except (OSError, PeerError) as error:
            raise PeerError(f"connecting to {address.host}:{address.port}: {error}") from error
        return made

    def put(self, blob: Blob) -> None:
        """Have the other rank keep a copy of ``blob``; returns once that is complete."""
        assert blob.label is not None
        request = {"put": blob.label.as_json(), "header_bytes": len(blob.header)}
        with _as_peer_error("sending a snapshot"):
            self._send_line(request)
            answer = self._receive_line()
            if answer.get("ready") is True:
                self._sock.sendall(blob.header)
                self._send(blob.view())
                answer = self._receive_line()
        if answer.get("ok") is not True:
            raise PeerError(f"the partner does not keep it: {str(answer.get('error'))[:200]}")

    def get(self, label: Label, allocate: Callable[[int], Tensor]) -> Blob:
        """The blob of ``label``, checked. Raises ``PeerError`` for anything else."""
        with _as_peer_error("fetching a snapshot"):
            self._send_line({"get": label.as_json()})
            answer = self._receive_line()
            if "error" in answer:
                raise PeerError(f"the other rank does not have it: {str(answer['error'])[:200]}")
            return self._receive_blob(label, answer.get("header_bytes"), allocate)

    # --- the serving side -----------------------------------------------------------------------

    def is_greeted(self, token: str, within_s: float) -> bool:
        """Whether the other side knows ``token``. Reads a few bytes and no more."""
        expected = _MAGIC + token.encode()
        deadline = time.monotonic() + within_s
        got = b""
        while len(got) < _GREETING_BYTES:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._sock.settimeout(left_s)
            piece = self._sock.recv(_GREETING_BYTES - len(got))
            if not piece:
                return False
            got += piece
        if not hmac.compare_digest(got, expected):
            return False
        self._sock.sendall(_WELCOME)
        return True

    def next_request(self) -> dict[str, Any] | None:
        """The next request; ``None``: the other side has gone. Waits as long as that takes."""
        self._sock.settimeout(None)
        first = self._sock.recv(1)
        if not first:
            return None
        self._sock.settimeout(SILENCE_S)
        return self._receive_line(first)

    def answer(self, answer: dict[str, Any]) -> None:
        """Answer a request."""
        self._send_line(answer)

    def send_blob(self, blob: Blob) -> None:
        """Answer a ``get``."""
        self._send_line({"header_bytes": len(blob.header)})
        self._sock.sendall(blob.header)
        self._send(blob.view())

    def receive_blob(
        self, label: Label, header_bytes: Any, allocate: Callable[[int], Tensor]
    ) -> Blob:
        """What follows a ``put``. Raises ``PeerError`` unless it is intact."""
        _check_header_size(header_bytes)
        self._send_line({"ready": True})
        return self._receive_blob(label, header_bytes, allocate)

    # --- both -----------------------------------------------------------------------------------

    def _receive_blob(
        self, label: Label, header_bytes: Any, allocate: Callable[[int], Tensor]
    ) -> Blob:
        _check_header_size(header_bytes)
        header = self._receive(header_bytes)
        blob = Blob(header, allocate(label.nbytes), label)
        content, got = blob.view(), 0
        while got < len(content):
            count = self._sock.recv_into(content[got : got + _PIECE_BYTES])
            if not count:
                raise PeerError("the connection ended in the middle")
            got += count
        if not is_intact(blob):
            raise PeerError(f"step {label.step} has arrived with another checksum than was told")
        try:
            read_header(blob.header, blob.nbytes)
        except ValueError as error:
            raise PeerError(str(error)) from error
        blob.is_copied = True
        return blob

    def _send(self, content: memoryview) -> None:
        # In pieces: the timeout of a socket is for the whole of what is sent with one call.
        for begin in range(0, len(content), _PIECE_BYTES):
            self._sock.sendall(content[begin : begin + _PIECE_BYTES])

    def _send_line(self, document: dict[str, Any]) -> None:
        line = json.dumps(document).encode() + b"\n"
        if len(line) > _MOST_REQUEST_BYTES:
            raise PeerError("a request that is too long")
        self._sock.sendall(line)

    def _receive_line(self, begun: bytes = b"") -> dict[str, Any]:
        line = begun
        while not line.endswith(b"\n"):
            if len(line) >= _MOST_REQUEST_BYTES:
                raise PeerError("a line that is too long")
            # Byte by byte: what follows it is not part of it. Lines are short and few.
            piece = self._sock.recv(1)
            if not piece:
                raise PeerError("the connection ended")
            line += piece
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PeerError("a line that is no JSON") from error
        if not isinstance(document, dict):
            raise PeerError("a line that is no object")
        return document

    def _receive(self, count: int) -> bytes:
        """Exactly ``count`` bytes; memory grows with what has arrived."""
        got = bytearray()
        while len(got) < count:
            piece = self._sock.recv(min(count - len(got), _PIECE_BYTES))
            if not piece:
                raise PeerError("the connection ended in the middle")
            got += piece
        return bytes(got)


def _check_header_size(count: Any) -> None:
    if type(count) is not int or not 0 < count <= MOST_HEADER_BYTES:
        raise PeerError(f"a header of {str(count)[:20]} bytes")


@contextlib.contextmanager
def _as_peer_error(what: str) -> Any:
    try:
        yield
    except OSError as error:
        raise PeerError(f"{what}: {error}") from error
