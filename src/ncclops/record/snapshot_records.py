"""The small documents of a rank's snapshot (``snapshot_files``), one type for each, as read back.

``capture`` writes plain dictionaries, since the monitor process has the standard library only. A
document that is not there or has a field of another type is the empty one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ncclops.record import snapshot_files
from ncclops.record.documents import read_document, read_list

Record = TypeVar("Record")


class LastOperation(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank entered last in a group with this ``name`` and ``desc``.

    ``pending``: it has not completed; ``at`` is when it began, in seconds since the epoch.
    """

    op: str
    seq: int
    at: float
    pending: bool = False
    name: str | None = None
    desc: str | None = None


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process group."""

    name: str | None = None
    desc: str | None = None
    last_op: LastOperation | None = None


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The process from outside; ``other_program`` is what it has become by exec."""

    host: str | None = None
    pid: int | None = None
    state_name: str | None = None
    other_program: str | None = None


class MissingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why parts of the snapshot are missing; ``ended_for``: why the rank's monitor ended it."""

    reason: str | None = None
    ended_for: str | None = None


def last_operation(directory: Path) -> LastOperation | None:
    """The newest operation of all groups of the rank whose snapshot is in ``directory``."""
    found = (_as(GroupRecord, group) for group in read_list(directory / snapshot_files.GROUPS))
    known = [
        msgspec.structs.replace(group.last_op, name=group.name, desc=group.desc)
        for group in found
        if group is not None and group.last_op is not None
    ]
    return max(known, key=lambda operation: operation.at, default=None)


def process(directory: Path) -> ProcessRecord:
    """What ``process.json`` says."""
    found = _as(ProcessRecord, read_document(directory / snapshot_files.PROCESS))
    return found or ProcessRecord()


def missing(directory: Path) -> MissingRecord:
    """What ``missing.json`` says."""
    found = _as(MissingRecord, read_document(directory / snapshot_files.MISSING))
    return found or MissingRecord()


def log_sizes(directory: Path) -> dict[str, int]:
    """How many bytes the rank's logs had, by the name of the file."""
    return _as(dict[str, int], read_document(directory / snapshot_files.LOGS)) or {}


def _as(type_: type[Record], document: dict[str, Any]) -> Record | None:
    try:
        return msgspec.convert(document, type_)
    except (ValueError, RecursionError):
        return None
