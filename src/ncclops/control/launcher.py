"""The process that has started a run, as ``run.json`` records it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ncclops.errors import UsageError
from ncclops.host import process_identity
from ncclops.host.process_identity import ProcessIdentity
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN, Launcher


def current() -> Launcher | None:
    """This process, for the record; None where the kernel does not show it."""
    try:
        return Launcher(**vars(process_identity.current()))
    except OSError:
        return None


def is_alive(run_dir: Path) -> bool | None:
    """Whether the process that has started the run runs; None where that is not known."""
    try:
        record = RUN.read(RunPaths(run_dir).run)
    except UsageError:
        return None
    if record is None or record.launcher is None:
        return None
    return process_identity.is_alive(ProcessIdentity(**msgspec.structs.asdict(record.launcher)))
