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
    """The pids to continue where a signal has stopped the agent, the launcher's child; the
    launcher's, too, if it is stopped. None where that cannot be seen from here, and none where the
    launcher alone is stopped, as by Ctrl-Z: the agent looks after the run, and can be asked."""
    started_by = _recorded(run_dir)
    if started_by is None or not process_identity.is_alive(started_by):
        return []
    children = process_view.children(started_by.pid)
    held = [pid for pid in children if _is_stopped(pid)]
    if not held and children:
        return []
    return [started_by.pid, *held] if _is_stopped(started_by.pid) else held


def _is_stopped(pid: int) -> bool:
    stat = process_view.read_stat(Path(f"/proc/{pid}"))
    return stat is not None and stat.state == "T"


def _recorded(run_dir: Path) -> ProcessIdentity | None:
    try:
        record = RUN.read(RunPaths(run_dir).run)
    except UsageError:
        return None
    if record is None or record.launcher is None:
        return None
    return ProcessIdentity.of(record.launcher)
