"""Who uses what a launch was to use: in words, for the one line that refuses it."""

from __future__ import annotations

import pwd
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from ncclops.control import launcher
from ncclops.errors import UsageError
from ncclops.host.listeners import find_listener
from ncclops.moments import format_moment
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN, RunRecord
from ncclops.record.variables import RUN_DIR
from ncclops.record.verdict_record import VERDICT

# A launch has its run directory for a moment before its record is there.
_RECORDED_WITHIN_S = 2.0


@dataclass(frozen=True)
class HoldingRun:
    """A run that has something."""

    path: Path
    record: RunRecord

    def __str__(self) -> str:
        return f"the run in {self.path}, launched as process {_launched(self.record)}"


def port_in_use(port: int) -> str:
    """`` by ...``, to follow "Address already in use"; empty where nothing is known."""
    listener = find_listener(port)
    if listener is None:
        return ""
    if listener.pid is None:
        return f" by a process of {_user(listener.uid)}"
    if (run := _run_of(listener.pid)) is not None:
        return f" by {run}"
    try:
        process = psutil.Process(listener.pid)
        since = format_moment(process.create_time())
        return f" by process {listener.pid} ({process.name()}), since {since}"
    except psutil.Error:  # it has just ended
        return ""


def run_at(port: int) -> HoldingRun | None:
    """The run whose process listens on ``port``, where there is one and we may see it."""
    listener = find_listener(port)
    return None if listener is None or listener.pid is None else _run_of(listener.pid)


def _run_of(pid: int) -> HoldingRun | None:
    try:
        run = psutil.Process(pid).environ().get(RUN_DIR)
    except psutil.Error:
        return None
    record = None if run is None else _record(Path(run))
    if run is None or record is None or record.launcher is None:
        return None
    return HoldingRun(Path(run), record)


def directory_in_use(run_dir: Path) -> str:
    """Whose run ``run_dir`` already holds, and what to do. Waits for a record that is to come."""
    deadline = time.monotonic() + _RECORDED_WITHIN_S
    while (record := _record(run_dir)) is None and time.monotonic() < deadline:
        time.sleep(0.05)  # a file of another process
    alive = launcher.is_alive(run_dir)
    free = ", and records are never overwritten: give --run-dir another path or remove it"
    if (outcome := _outcome(run_dir)) is not None:
        whose = f"which has ended ({outcome}){free}"
    elif record is None or record.launcher is None:
        whose = f"which another launch begins, or has left{free}"
    elif alive is False:
        whose = f"launched as process {_launched(record)}, which left no verdict{free}"
    else:
        where = f"on {record.launcher.host}" if alive is None else "and is under way"
        whose = (
            f"which was launched as process {_launched(record)} {where}:"
            f" give --run-dir another path, or end that run first (`ncclops stop {run_dir}`)"
        )
    return f"{run_dir} already holds a run, {whose}"


def _record(run_dir: Path) -> RunRecord | None:
    try:
        return RUN.read(RunPaths(run_dir).run)
    except UsageError:
        return None


def _outcome(run_dir: Path) -> str | None:
    try:
        verdict = VERDICT.read(RunPaths(run_dir).verdict)
    except UsageError:
        return None
    return None if verdict is None else verdict.outcome


def _launched(record: RunRecord) -> str:
    assert record.launcher is not None
    since = "" if record.started is None else f" at {format_moment(record.started)}"
    return f"{record.launcher.pid}{since}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
