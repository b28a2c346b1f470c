"""The agent's commands to a running worker: one type for each, one JSON object a message."""

from __future__ import annotations

import functools
from datetime import timedelta

import msgspec


class WorkerCommand(msgspec.Struct, frozen=True, kw_only=True, tag_field="command"):
    """Base of all commands."""


class RestartCommand(WorkerCommand, tag="restart", frozen=True, kw_only=True):
    """Have all ranks start the script again; ``hung`` is the initial rank that hangs, if any."""

    reason: str
    hung: int | None = None


class TightenCommand(WorkerCommand, tag="tighten", frozen=True, kw_only=True):
    """Shorten timeouts to these, as ``timeouts.model.Window`` has them."""

    process_group: timedelta
    soft: timedelta | None
    hard: timedelta | None


class EndingCommand(WorkerCommand, tag="ending", frozen=True, kw_only=True):
    """The attempt is ending, because of ``reason``: do not start the script again."""

    reason: str


class AbortCommand(WorkerCommand, tag="abort", frozen=True, kw_only=True):
    """Abort all process groups, since the process is about to be ended.

    ``if_waiting``: only if the main thread waits for peers, and not where an operation of NCCL may
    be under way. The abort ends that without an error, and what it has not summed would be saved by
    a script that is to save.
    """

    if_waiting: bool = False


_Any = RestartCommand | TightenCommand | EndingCommand | AbortCommand


def name_of(command: WorkerCommand) -> str:
    """What the message calls it, such as ``restart``."""
    return str(command.__struct_config__.tag)


def encode(command: WorkerCommand) -> bytes:
    """One JSON object."""
    return msgspec.json.encode(command)


@functools.cache
def _decoder() -> msgspec.json.Decoder[_Any]:
    return msgspec.json.Decoder(_Any)


def decode(message: bytes) -> WorkerCommand | None:
    """The command in ``message``; None for what is none, or not known."""
    try:
        return _decoder().decode(message)
    except (ValueError, RecursionError):  # of msgspec and of Unicode
        return None
