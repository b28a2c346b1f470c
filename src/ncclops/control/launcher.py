"""The process that has started a run, as ``run.json`` records it."""

from __future__ import annotations

from pathlib import Path

from ncclops.errors import UsageError
from ncclops.host import process_identity, process_view
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
    started_by = _recorded(run_dir)
    return None if started_by is None else process_identity.is_alive(started_by)


def stopped(run_dir: Path) -> list[int]:
    """The pids of the launcher and of its agent, the launcher's child, that a signal has stopped
    (SIGSTOP, or SIGTSTP from a terminal); none where that cannot be seen from here."""
    started_by = _recorded(run_dir)
    if started_by is None or not process_identity.is_alive(started_by):
        return []
    pids = [started_by.pid, *process_view.children(started_by.pid)]
    states = {pid: process_view.read_stat(Path(f"/proc/{pid}")) for pid in pids}
    return [pid for pid, stat in states.items() if stat is not None and stat.state == "T"]


def _recorded(run_dir: Path) -> ProcessIdentity | None:
    try:
        record = RUN.read(RunPaths(run_dir).run)
    except UsageError:
        return None
    if record is None or record.launcher is None:
        return None
    return ProcessIdentity.of(record.launcher)
