"""The small files of a rank's snapshot: stacks, groups, the process from outside, what is missing.

ncclops writes them, and they may still be damaged or come from elsewhere: they are read up to a
size, and what is not as expected is treated as absent.
"""

from __future__ import annotations

import linecache
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ncclops.flight.model import (
    SOME_WAIT,
    FlightEvidence,
    GroupState,
    RankEvidence,
    RankPlace,
    is_default_group,
)
from ncclops.flight.rank_place import place_in
from ncclops.record import documents, snapshot_files
from ncclops.record.paths import INCIDENT, RunPaths
from ncclops.record.regular_file import open_regular, read_regular
from ncclops.record.snapshot_files import FLIGHTS, GROUPS, MISSING, PROCESS, STACKS

ALL = (*FLIGHTS, STACKS, GROUPS, PROCESS, MISSING)
_MOST_BYTES = 8 << 20
# Gloo's check of a message's length against the buffer for it.
_OVERRUN = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d{1,15}) vs (\d{1,15})")
_TAIL_BYTES = 256 << 10
_ENDED_STATES = {"Z", "X", "gone", "ended", "zombie", "dead"}
_STOPPED_STATES = {"T", "stopped"}
# Our threads run every second; on an overloaded machine a little less often.
_NO_PYTHON_S = 3.0
# Kinds of faults that a rank does not report itself.
_SEEN_BY_OTHERS = {"hung", "soft-timeout", "completion-timeout", "died", "lost"}
# A call that waits inside C shows no frame of its own; the line of the user does.
_WAITS = re.compile(r"\.(?:wait|synchronize|item)\(")


def read(evidence: FlightEvidence, rank: RankEvidence, folder: Path) -> None:
    """Add what the small files in a rank's ``folder`` say."""
    read_stacks(rank, folder / STACKS)
    left_by = snapshot_files.left_by(folder)
    if rank.place is not None and left_by is not None:
        # It stands in no collective any more.
        rank.place = replace(rank.place, inside=None, left=left_by[:400])
    groups = _load(folder / GROUPS)
    if isinstance(groups, dict):
        groups = groups.get("groups")
    rank.groups = tuple(
        state for about in (groups if isinstance(groups, list) else ()) if (state := _group(about))
    )
    _read_process(rank, _load(folder / PROCESS))
    missing = _load(folder / MISSING)
    if isinstance(missing, dict):
        rank.missing = str(missing.get("reason") or "it gave no reason")[:400]
        rank.silent = missing.get("silent") is True
        has_ended = missing.get("ended") is True and not (folder / FLIGHTS[0]).exists()
        if rank.ended is None and has_ended:
            rank.ended = rank.missing
            rank.ended_well = missing.get("ended_well") is True
            rank.ended_signal = _text_in(missing, "ended_signal")
    elif (folder / MISSING).exists():
        evidence.notes.append(f"{folder / MISSING} cannot be read")


def read_stacks(rank: RankEvidence, path: Path) -> None:
    """Where the rank's main thread stands, from its stacks."""
    text = _text(path)
    if text is not None:
        place = place_in(text)
        rank.place = place and _with_wait(place)


def _with_wait(place: RankPlace) -> RankPlace:
    frame = place.frame
    if frame is None or place.inside or place.what or place.frames[:1] != (frame,):
        return place
    path = Path(frame.file)
    if not (path.suffix == ".py" and path.is_file() and path.stat().st_size <= _MOST_BYTES):
        return place
    if _WAITS.search(linecache.getline(frame.file, frame.line)):
        return replace(place, inside=SOME_WAIT)
    return place


def read_incident(evidence: FlightEvidence, directory: Path) -> None:
    """What the incident itself knows: which ranks had left, and how."""
    incident = _load(directory / INCIDENT)
    faults = incident.get("faults") if isinstance(incident, dict) else None
    summaries: dict[int, str] = {}
    for fault in faults if isinstance(faults, list) else ():
        if not isinstance(fault, dict) or not isinstance(fault.get("initial_rank"), int):
            continue
        number, summary = fault["initial_rank"], str(fault.get("summary") or "")[:400]
        summaries.setdefault(number, "" if _text_in(fault, "kind") in _SEEN_BY_OTHERS else summary)
        if fault.get("gone"):
            evidence.rank(number).ended = evidence.rank(number).ended or summary or "it ended"
    evidence.faults = summaries


def renumber(evidence: FlightEvidence) -> None:
    """Give groups the ranks that folders are named by: those at launch.

    Groups count the ranks that were left in their iteration. Ranks that move keep their order,
    unless a custom assignment says otherwise.
    """
    default = next(
        (
            group.ranks
            for rank in evidence.ranks.values()
            for group in rank.groups
            if is_default_group(group.name, group.desc)
        ),
        (),
    )
    present = tuple(rank for rank, about in sorted(evidence.ranks.items()) if about.groups)
    there = present if len(present) == len(default) else tuple(sorted(evidence.ranks))
    if not default or default == there or len(default) != len(there):
        return
    at_launch = dict(zip(default, there, strict=True))
    for about in evidence.ranks.values():
        about.groups = tuple(
            replace(group, ranks=tuple(at_launch.get(rank, rank) for rank in group.ranks))
            for group in about.groups
        )
        if about.record is not None:
            about.record.ranks_of = {
                name: tuple(at_launch.get(rank, rank) for rank in ranks)
                for name, ranks in about.record.ranks_of.items()
            }
            about.record.others = ()
    evidence.notes.append("ranks are those at launch: the job had lost some before")


def read_last_words(evidence: FlightEvidence, run: Path) -> None:
    """The reasons in the error output of ranks that have ended."""
    for number, rank in evidence.ranks.items():
        if rank.ended is None:
            continue
        tail = _tail(RunPaths(run).rank(number).stderr_log)
        if found := _OVERRUN.search(tail):
            rank.overrun = (int(found.group(1)), int(found.group(2)))
        if (fatal := tail.rfind("Fatal Python error:")) >= 0 and rank.place is None:
            rank.place = place_in(tail[fatal:])


def _tail(path: Path) -> str:
    try:
        with open_regular(path) as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            return stream.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _group(about: Any) -> GroupState | None:
    try:
        return GroupState(
            name=str(about["name"]),
            desc=str(about.get("desc") or ""),
            ranks=tuple(sorted(int(rank) for rank in about["ranks"])),
            backend=str(about.get("backend") or ""),
            last_enqueued=_number(about.get("last_enqueued")),
            last_completed=_number(about.get("last_completed")),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _number(value: Any) -> int:
    return -1 if value is None else int(value)


def _read_process(rank: RankEvidence, view: Any) -> None:
    if not isinstance(view, dict):
        return
    state = _text_in(view, "state") or _text_in(view, "state_name")
    how = view.get("ended_by") or view.get("exit") or view.get("exit_code")
    if state in _ENDED_STATES or (state is None and how is not None):
        rank.ended = f"its process has ended ({how})" if how is not None else "its process is gone"
        rank.ended_well = how == 0 or view.get("ended_well") is True
        rank.ended_signal = _text_in(view, "ended_signal")
        return
    ran_s_ago = view.get("python_ran_s_ago")
    if isinstance(ran_s_ago, int | float) and ran_s_ago > _NO_PYTHON_S:
        rank.no_python_s = float(ran_s_ago)
    rank.stopped = state in _STOPPED_STATES


def _text_in(document: dict[str, Any], name: str) -> str | None:
    value = document.get(name)
    return value if isinstance(value, str) else None


def _load(path: Path) -> Any:
    try:
        return documents.load(path)
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str | None:
    try:
        return read_regular(path, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
