"""What the agent and its fork server (``ncclops.worker.fork_server``) say to each other.

They share a socket that keeps messages apart. The server speaks first, once: :class:`Ready` or
:class:`Unfit`. From then on each request is answered with :class:`Forked` or :class:`Refused`. A
request is one byte and descriptors. For a worker: a file with the environment, as JSON, its
standard input, output and error, and its end of the socket for the agent's commands. For a server
of torch's store: the listening socket, and its log.
"""

from __future__ import annotations

import functools

import msgspec

# Descriptor of the server's end of the socket; its presence makes a worker's command a server.
FORK_SERVER_FD = "NCCLOPS_FORK_SERVER_FD"
# JSON: the modules that the server imports.
FORK_SERVER_IMPORTS = "NCCLOPS_FORK_SERVER_IMPORTS"

WORKER, STORE = b"f", b"s"
DESCRIPTORS = {WORKER: 5, STORE: 2}  # how many come with each request
MOST_BYTES = 64 << 10


class ForkMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="message"):
    """Base of all messages of the server."""


class Ready(ForkMessage, tag="ready", frozen=True, kw_only=True):
    """All is imported; ``not_imported`` are modules that were not, each with the reason."""

    seconds: float
    not_imported: dict[str, str] = {}


class Unfit(ForkMessage, tag="unfit", frozen=True, kw_only=True):
    """A fork would not be safe, or came to nothing: ``why``. The server ends."""

    why: str

    def __str__(self) -> str:
        return self.why


class Forked(ForkMessage, tag="forked", frozen=True, kw_only=True):
    """The process runs, a child of the agent by now."""

    pid: int


class Refused(ForkMessage, tag="refused", frozen=True, kw_only=True):
    """This request came to nothing; the next one may not."""

    why: str

    def __str__(self) -> str:
        return self.why


def encode(message: ForkMessage) -> bytes:
    """One JSON object."""
    return msgspec.json.encode(message)


@functools.cache
def _decoder() -> msgspec.json.Decoder[Ready | Unfit | Forked | Refused]:
    return msgspec.json.Decoder(Ready | Unfit | Forked | Refused)


def decode(message: bytes) -> Ready | Unfit | Forked | Refused | None:
    """The message; None for what is none."""
    try:
        return _decoder().decode(message)
    except (ValueError, RecursionError):
        return None
