"""The messages from a node's rendezvous process to its agent: one JSON object a line, one type
for each."""

from __future__ import annotations

from typing import Any, Union

import msgspec


class Message(msgspec.Struct, tag_field="is", frozen=True):
    """Base of all messages. Each of them shows that the job's store answers."""


class Tick(Message, tag="tick", frozen=True):
    """A heartbeat has reached the store."""


class Connected(Message, tag="connected", frozen=True):
    """The job's store has answered."""


class Waiting(Message, tag="waiting", frozen=True):
    """The nodes that are ``here`` by now; ``begun``: a round is under way without us."""

    here: list[str]
    begun: bool


class Met(Message, tag="met", frozen=True):
    """The nodes of a round have met: ours is node ``rank`` of ``size``."""

    rank: int
    size: int


class Gathered(Message, tag="gathered", frozen=True):
    """On node 0: the facts about all nodes, by rank."""

    facts: list[dict[str, Any]]


class Logged(Message, tag="record", frozen=True):
    """The next record of the shared log."""

    record: dict[str, Any]


class NoRound(Message, tag="failed", frozen=True):
    """There is no round, and ``why``."""

    why: str


class Unneeded(Message, tag="not-needed", frozen=True):
    """The job has ended, and this spare node was not needed."""


class StoreLost(Message, tag="store-lost", frozen=True):
    """The job's store does not answer any more."""

    why: str


class ProcessEnded(Message, tag="ended", frozen=True):
    """The rendezvous process has ended, and not by a command; sent by ``Peers`` itself."""


_decoder = msgspec.json.Decoder(Union[tuple(Message.__subclasses__())])  # noqa: UP007


def encode(message: Message) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    """The inverse of ``encode``. Raises ``msgspec.DecodeError`` if ``line`` is no message."""
    message: Message = _decoder.decode(line)
    return message
