"""Which process it was. Standard library only.

The kernel gives a number again, after a restart of the machine from the beginning, and each PID
namespace has numbers of its own. So a recorded process is believed together with all of these.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ncclops.host import process_view
from ncclops.host_name import host_name


@dataclass(frozen=True)
class ProcessIdentity:
    """A process on ``host``; ``started_ticks`` is field 22 of ``/proc/<pid>/stat``."""

    host: str
    pid: int
    started_ticks: int
    boot_id: str
    pid_namespace: int

    @classmethod
    def of(cls, recorded: Any) -> ProcessIdentity:
        """The process that ``recorded`` has the same fields of."""
        return cls(**{field.name: getattr(recorded, field.name) for field in fields(cls)})


def current() -> ProcessIdentity:
    """This process. Raises ``OSError`` where ``/proc`` is not there."""
    stat = process_view.read_stat(Path("/proc/self"))
    started = 0 if stat is None else stat.started_ticks
    return ProcessIdentity(host_name(), os.getpid(), started, process_view.boot_id(), _namespace())


def is_alive(process: ProcessIdentity) -> bool | None:
    """Whether it has not ended; None where that cannot be seen from here."""
    if process.host != host_name():
        return None
    if process.boot_id != process_view.boot_id():
        return False
    if process.pid_namespace != _namespace():
        return None
    return process_view.is_same_process(process.pid, process.started_ticks)


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
