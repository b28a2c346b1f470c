"""The incident of a team that the agent is about to end: where no restart core has written one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ncclops.capture.run_snapshots import collect_run
from ncclops.record import incidents

# Of the stop of a job that has failed already.
LIMIT = timedelta(seconds=4)


def record_end(
    run: Path,
    *,
    ended: Mapping[int, str],
    running: Sequence[int],
    attempt: int,
    hung: Mapping[int, str] | None = None,
    limit: timedelta = LIMIT,
) -> Path:
    """Take snapshots of the ranks that still run, and write the incident; its directory.

    ``ended`` are the initial ranks that have failed, the one to blame first, and how each ended
    (``exit code 1``, ``SIGKILL``); ``hung`` are those that still run and are to blame, with the
    evidence. Blocks for ``limit`` at most; call it in a thread, before the
    others get SIGTERM. Raises ``OSError`` when the run directory cannot be written.
    """
    at, started = time.time(), time.monotonic()
    parent = run / incidents.INCIDENTS
    directory = parent / str(incidents.next_number(parent))
    collected = collect_run(run, running, directory, limit)
    for rank, how in ended.items():
        reason = f"its process has ended ({how})"
        incidents.add_missing(incidents.rank_dir(directory, rank), reason, list(incidents.PICTURE))
    collect_ms = round(1000 * (time.monotonic() - started), 3)
    faults = [_hang(rank, how, at) for rank, how in (hung or {}).items()]
    faults += [_fault(run, rank, how, attempt, at) for rank, how in ended.items()]
    record = _record(faults, list(ended), attempt, at)
    record |= {"world_size_before": len(ended) + len(running), "world_size": 0}
    record |= {"phases_ms": {"collect": collect_ms}, "silent": sorted(collected.reasons)}
    incidents.write_json(directory / incidents.INCIDENT, record)
    return directory


def _record(
    faults: list[dict[str, Any]], ended: list[int], attempt: int, at: float
) -> dict[str, Any]:
    """In the form of ``restart.incident.Incident``; nothing started again, so iteration 0."""
    first = faults[0]
    return {
        "schema": "ncclops.incident/1",
        "iteration": 0,
        "attempt": attempt,
        "cause": first["kind"],
        "summary": first["summary"],
        "detail": first["detail"],
        "first_faulty_rank": first["initial_rank"],
        "faulty_ranks": [fault["initial_rank"] for fault in faults],
        "ranks_lost": ended,
        "exception": first["summary"] if first["traceback"] else None,
        "traceback": first["traceback"],
        "faults": faults,
        "initial_rank": None,
        "rank_before": None,
        "rank": None,
        "at": at,
    }


def _hang(rank: int, evidence: str, at: float) -> dict[str, Any]:
    return {
        "kind": "hung",
        "initial_rank": rank,
        "rank": rank,
        "iteration": 0,
        "at": at,
        "summary": f"rank {rank} hangs: {evidence}",
        "detail": f"hangs: {evidence}",
        "traceback": None,
        "gone": False,
        "secondary": False,
    }


def _fault(run: Path, rank: int, how: str, attempt: int, at: float) -> dict[str, Any]:
    said, traceback = _exception(run / "ranks" / str(rank) / f"error-{attempt}.json")
    return {
        "kind": "exception" if said else "died",
        "initial_rank": rank,
        "rank": rank,
        "iteration": 0,
        "at": at,
        "summary": said or f"rank {rank}: the process ended ({how})",
        "detail": None if said else f"the process ended ({how})",
        "traceback": traceback,
        "gone": True,
        "secondary": False,
    }


def _exception(path: Path) -> tuple[str | None, str | None]:
    """What a worker has left in torchelastic's error file: the exception, and its traceback."""
    try:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, str):
            return message, message
        return str(message["message"]), str(message["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
