"""What the pages show besides the status: read when it is asked for, in a thread of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from ncclops.diagnose.stacks_text import StyledLine
from ncclops.errors import NcclopsError
from ncclops.host_name import host_name
from ncclops.live_view.composing import Content
from ncclops.live_view.lines import Line, Style, line
from ncclops.live_view.view import Request
from ncclops.rank_lists import rank_list
from ncclops.record import incident_record
from ncclops.record.paths import RunPaths, numbered
from ncclops.record.regular_file import open_regular
from ncclops.status.model import RunStatus

# Of a log: more than anybody scrolls back through on a screen that is redrawn as it grows.
_LOG_BYTES = 256 << 10
# As `ncclops stacks`.
_PATIENCE = timedelta(seconds=5)
# Of a run with thousands of incidents, those that are searched for one about the rank.
_SEARCHED = 64
_STYLES: dict[str, Style] = {"bold": "bold", "dim": "dim", "bold red": "red", "yellow": "yellow"}


def read(
    run_dir: Path, request: Request, status: RunStatus, shown: Content | None = None
) -> Content:
    """What ``request`` is for, after ``shown``. May take as long as the ranks' answers; never
    raises."""
    try:
        match request.page:
            case "log":
                return _log(run_dir, request, status, None if shown is None else shown.follows)
            case "stacks":
                return _stacks(run_dir)
        return _incident(run_dir, request)
    except NcclopsError as error:
        return said(request.page, str(error))
    except OSError as error:
        return said(request.page, f"cannot be read: {error.strerror or error}")


def read_again(shown: Content) -> Content:
    """``shown``, a log, as it is now; as it was where it cannot be read any more."""
    if shown.follows is None:
        return shown
    try:
        lines = _tail(shown.follows)
    except OSError:
        return shown
    return replace(shown, lines=lambda _: lines)


def said(title: str, why: str) -> Content:
    """A page that has nothing but ``why``."""
    return Content(title=title, lines=lambda _: [line(why, "yellow")])


# --- logs -------------------------------------------------------------------------------------


def _log(run_dir: Path, request: Request, status: RunStatus, shown: Path | None) -> Content:
    rank = request.rank
    if rank is None:
        return said("log", "no rank has started yet")
    files = _log_files(run_dir, rank)
    if not files:
        return said(f"rank {rank}: log", _no_log(rank, status))
    if request.which and shown in files:
        number = (files.index(shown) + 1) % len(files)
    else:
        # Of its two streams the one that it has written on last.
        streams = [path for path in files if path.name in ("stdout.log", "stderr.log")]
        number = files.index(max(streams or files, key=lambda path: path.stat().st_mtime))
    path, lines = files[number], _tail(files[number])
    of = f", {number + 1} of {len(files)} files" if len(files) > 1 else ""
    title = f"rank {rank}: {path.name}{of}: {path}"
    return Content(title=title, lines=lambda _: lines, follows=path)


def _no_log(rank: int, status: RunStatus) -> str:
    host = next((each.host for each in status.ranks if each.rank == rank), "")
    if host and host != host_name():
        return f"rank {rank} runs on {host}: its log is in the run directory there"
    return f"rank {rank} has written nothing yet"


def _log_files(run_dir: Path, rank: int) -> list[Path]:
    """The rank's files that hold something."""
    paths = RunPaths(run_dir).rank(rank)
    found = []
    for path in (paths.stdout_log, paths.stderr_log, paths.nccl_log, paths.worker_log):
        with suppress(OSError):
            if path.stat().st_size:
                found.append(path)
    return found


def _tail(path: Path) -> Sequence[Line]:
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LOG_BYTES))
        data = file.read(_LOG_BYTES) or b""
    lines = data.split(b"\n")
    if size > _LOG_BYTES:
        lines[0] = f"… {(size - len(data) + len(lines[0])) >> 10:,} KiB before".encode()
    if lines[-1] == b"":
        lines.pop()
    return [line(_last_drawing(each).decode(errors="replace")) for each in lines]


def _last_drawing(text: bytes) -> bytes:
    """Of a progress bar, which is drawn again after each carriage return, the newest state."""
    drawings = [each for each in text.split(b"\r") if each.strip()]
    return drawings[-1] if drawings else b""


# --- stacks and incidents -----------------------------------------------------------------------


def _stacks(run_dir: Path) -> Content:
    from ncclops.diagnose.stacks_text import stack_lines
    from ncclops.diagnose.where import look
    from ncclops.live_view.timeline import clock

    seen = look(run_dir, limit=_PATIENCE, native="silent")

    def lines(rank: int | None) -> list[Line]:
        return _styled(stack_lines(seen, first=rank))

    answered = len(seen.collected.answered)
    return Content(title=f"stacks at {clock(seen.at)}, of {answered} ranks here", lines=lines)


def _incident(run_dir: Path, request: Request) -> Content:
    from ncclops.diagnose.incident_report import report_incident
    from ncclops.diagnose.incident_text import incident_lines

    known = numbered(RunPaths(run_dir).incidents)
    if not known:
        return said("incident", "this run has no incidents: nothing has failed in it")
    about = _about(run_dir, request.rank, known)
    first = known.index(known[-1] if about is None else about)
    number = known[min(max(first + request.which, 0), len(known) - 1)]
    lines = _styled(incident_lines(report_incident(run_dir, number)))
    if about is None and request.rank is not None and request.which == 0:
        note = f"no incident of rank {request.rank}; this is the latest of all"
        lines = [line(note, "yellow"), *lines]
    title = f"incident {number}, of {rank_list(known)}"
    return Content(title=title, lines=partial(_whatever_rank, lines))


def _whatever_rank(lines: Sequence[Line], _: int | None) -> Sequence[Line]:
    return lines


def _about(run_dir: Path, rank: int | None, known: Sequence[int]) -> int | None:
    """The newest incident in which ``rank`` had a fault, was lost, or did not come."""
    for number in reversed(known[-_SEARCHED:]):
        record = incident_record.read(RunPaths(run_dir).incident(number))
        if record is None:
            continue
        if rank in {*record.faulty_ranks, *record.ranks_lost, *record.absent_ranks}:
            return number
    return None


def _styled(lines: Iterable[StyledLine]) -> list[Line]:
    shown = []
    for parts in lines:
        # A message may have lines of its own.
        whole = Line()
        for text, style in parts:
            first, *rest = text.split("\n") or [""]
            whole = whole.add(first, _STYLES.get(style, ""))
            for more in rest:
                shown.append(whole)
                whole = line(more, _STYLES.get(style, ""))
        shown.append(whole)
    return shown
