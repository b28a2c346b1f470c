"""``snapshot-server.json`` of a rank: how a running worker is asked for a snapshot of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from ncclops.record.documents import read_document, write_document

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SnapshotServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The process, by its host, number and time of start since a boot; its socket's abstract name.

    ``tid``, ``signal``, ``stacks_fd`` and ``main_thread`` are for a dump of its stacks by signal
    (``capture.signal_stacks``), 0 without. ``device`` has the variables that name its GPU.
    """

    rank: Number
    host: str
    pid: Annotated[int, msgspec.Meta(gt=0, le=2**31 - 1)]
    started_ticks: Number
    boot_id: str = ""
    tid: Number = 0
    signal: Number = 0
    stacks_fd: int = 0
    main_thread: Number = 0
    address: str
    device: dict[str, str] = {}


def read(path: Path) -> SnapshotServerRecord | None:
    """What ``path`` holds; None if it is not there, or damaged."""
    try:
        return msgspec.convert(read_document(path), SnapshotServerRecord)
    except ValueError:
        return None


def write(path: Path, record: SnapshotServerRecord) -> None:
    """Write it, whole or not at all. Raises ``OSError``."""
    write_document(path, msgspec.to_builtins(record))
