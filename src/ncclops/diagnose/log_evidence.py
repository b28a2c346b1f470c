"""What failed, by the output of a rank up to an incident: the classifier run on the logs' ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ncclops.classify.model import KERNEL
from ncclops.diagnose.incident_events import WorkerEnd
from ncclops.record import snapshot_files, snapshot_records
from ncclops.record.paths import RunPaths, numbered
from ncclops.record.regular_file import open_regular

# Of each log; a failure is at its end.
_WINDOW_BYTES = 1 << 20
# What a rank writes while it fails is under way when its snapshot is taken.
_AFTERWARDS_BYTES = 16 << 10
_SHOWN_LINES = 5
# In the place of a file, for what a rank has reported itself.
REPORTED = "exception"


def classify_rank(
    run: Path, incident: Path, rank: int, *, said: str | None, end: WorkerEnd | None
) -> dict[str, Any] | None:
    """The classifier's verdict with its evidence lines; None where nothing is known of it.

    ``said`` is the exception that the rank reported, ``end`` how it ended, if it has.
    Logs are read from where they stood at the incident before this one.
    """
    from ncclops.classify import Scanner

    scanner = Scanner()
    skipped: dict[str, int] = {}
    for path, start, stop in _windows(run, incident, rank, ended=end is not None):
        data, lines_before = _read(path, start, stop)
        skipped[str(path)] = lines_before
        scanner.feed(rank, str(path), data)
    if said:
        scanner.feed(rank, REPORTED, f"{said}\n")
    if end is not None:
        scanner.add_exit(rank, code=end.code, signal=end.signal)
        scanner.feed(rank, KERNEL, "" if end.why is None else f"{end.why}\n")
    report = scanner.verdict()
    if not report.verdict.names_failure:
        return None
    lines = [
        dataclasses.replace(line, line=line.line + skipped.get(line.file, 0))
        for line in report.evidence[:_SHOWN_LINES]
    ]
    return report.verdict.as_json() | {"evidence": [line.as_json() for line in lines]}


def _windows(
    run: Path, incident: Path, rank: int, *, ended: bool
) -> Iterable[tuple[Path, int, int | None]]:
    at_incident = snapshot_records.log_sizes(snapshot_files.rank_dir(incident, rank))
    before = snapshot_records.log_sizes(_previous(incident, rank))
    paths = RunPaths(run).rank(rank)
    for path in (paths.stderr_log, paths.stdout_log):
        if path.is_file():
            end = at_incident.get(path.name)
            yield path, before.get(path.name, 0), None if ended or end is None else end


def _previous(incident: Path, rank: int) -> Path:
    number = int(incident.name)
    earlier = [each for each in numbered(incident.parent) if each < number]
    return snapshot_files.rank_dir(incident.parent / str(max(earlier, default=-1)), rank)


def _read(path: Path, start: int, end: int | None) -> tuple[bytes, int]:
    """The end of what ``path`` has between two offsets, and how many lines are before that."""
    size = path.stat().st_size
    stop = size if end is None else min(size, end + _AFTERWARDS_BYTES)
    begin = max(start, stop - _WINDOW_BYTES, 0)
    with open_regular(path) as file:
        lines_before = 0
        left = begin
        while left > 0 and (chunk := file.read(min(left, 1 << 20))):
            lines_before += chunk.count(b"\n")
            left -= len(chunk)
        return file.read(max(0, stop - begin)), lines_before
