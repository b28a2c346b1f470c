"""Between a node's agent and its rendezvous process: one JSON object a line, one type for each.

Messages go to the agent, commands to the rendezvous process.
"""

from __future__ import annotations

from typing import Union

import msgspec

from ncclops.cluster.records import Record
from ncclops.cluster.store_values import NodeFacts


class Message(msgspec.Struct, tag_field="is", frozen=True):
    """Base of all messages. Each of them shows that the job's store answers."""


class Tick(Message, tag="tick", frozen=True):
    """A heartbeat has reached the store."""


class Connected(Message, tag="connected", frozen=True):
    """The job's store has answered."""


class Waiting(Message, tag="waiting", frozen=True):
    """The nodes that are ``here`` by now; ``begun``: a round is under way without us.

    ``first`` is the node that has named the job, and its run.
    """

    here: list[str]
    begun: bool
    first: str = ""


class Met(Message, tag="met", frozen=True):
    """The nodes of a round have met: ours is node ``rank`` of ``size``."""

    rank: int
    size: int


class Gathered(Message, tag="gathered", frozen=True):
    """On node 0: the facts about all nodes, by rank."""

    facts: list[NodeFacts]


class Logged(Message, tag="record", frozen=True):
    """The next record of the shared log."""

    record: Record


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


class Command(msgspec.Struct, tag_field="do", frozen=True):
    """Base of all commands."""


class Meet(Command, tag="meet", frozen=True):
    """Take part in the next round, for ``attempt``, with these facts about our node."""

    attempt: int
    facts: NodeFacts


class Post(Command, tag="post", frozen=True):
    """Put a record into the log of the round."""

    record: Record


class Leave(Command, tag="leave", frozen=True):
    """End; with ``over`` no node may join the job any more."""

    over: bool


_messages = msgspec.json.Decoder(Union[tuple(Message.__subclasses__())])  # noqa: UP007
_commands = msgspec.json.Decoder(Meet | Post | Leave)


def encode(message: Message | Command) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    """The message in ``line``. Raises ``msgspec.DecodeError`` if it is none."""
    message: Message = _messages.decode(line)
    return message


def decode_command(line: bytes) -> Meet | Post | Leave:
    """The command in ``line``. Raises ``msgspec.DecodeError`` if it is none."""
    command: Meet | Post | Leave = _commands.decode(line)
    return command
