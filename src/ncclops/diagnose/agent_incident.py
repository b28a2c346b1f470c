"""The incident that the agent records before it ends a team, where no restart core wrote one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ncclops.capture.run_snapshots import collect_run
from ncclops.process_ends import exit_status
from ncclops.record import incident_record, snapshot_files
from ncclops.record.error_file import read_error
from ncclops.record.incident_record import ELSEWHERE, FaultRecord, IncidentRecord
from ncclops.record.paths import RunPaths

# Of the stop of a job that has failed already.
LIMIT = timedelta(seconds=4)


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended: with ``exit_code``, or by ``signal`` (its name)."""

    exit_code: int | None
    signal: str | None

    def __str__(self) -> str:
        return exit_status(self.exit_code, self.signal)


def record_end(
    run: Path,
    *,
    ended: Mapping[int, ProcessEnd],
    running: Sequence[int],
    attempt: int,
    hung: Mapping[int, str] | None = None,
    elsewhere: bool = False,
    limit: timedelta = LIMIT,
) -> Path:
    """Take snapshots of the ranks that still run, and write the incident; its directory.

    ``ended`` are the initial ranks whose processes have ended, the one to blame first; ``hung`` are
    those that still run and are to blame, with the evidence. ``elsewhere``: a rank of another node
    is to blame. Blocks for ``limit`` at most; call it in a thread, before the others get SIGTERM.
    Raises ``OSError`` when the run directory cannot be written.
    """
    at, started = time.time(), time.monotonic()
    paths = RunPaths(run)
    parent = paths.incidents
    directory = parent / str(snapshot_files.next_number(parent))
    collected = collect_run(run, running, directory, limit)
    for rank, how in ended.items():
        reason = f"its process has ended ({how})"
        where = snapshot_files.rank_dir(directory, rank)
        snapshot_files.add_missing(
            where,
            reason,
            list(snapshot_files.COMPLETE),
            ended=True,
            ended_well=how.exit_code == 0,
            ended_signal=how.signal,
        )
    collect_ms = round(1000 * (time.monotonic() - started), 3)
    faults = [_hang(rank, how, at) for rank, how in (hung or {}).items()]
    faults += [
        _fault(paths.rank(rank).error(attempt), rank, how, at) for rank, how in ended.items()
    ]
    if elsewhere:
        faults = [_elsewhere(min(running), at)]
    first = faults[0]
    incident_record.write(
        directory,
        IncidentRecord(
            iteration=0,  # nothing started again
            attempt=attempt,
            cause=first.kind,
            summary=first.summary,
            detail=first.detail,
            first_faulty_rank=first.initial_rank,
            absent_ranks=incident_record.absent_ranks(first.summary),
            faulty_ranks=[fault.initial_rank for fault in faults],
            ranks_lost=list(ended),
            exception=first.summary if first.traceback else None,
            traceback=first.traceback,
            faults=faults,
            at=at,
            world_size_before=len(ended) + len(running),
            world_size=0,
            phases_ms={"collect": collect_ms},
            silent=sorted(collected.reasons),
        ),
    )
    return directory


def _hang(rank: int, evidence: str, at: float) -> FaultRecord:
    return FaultRecord(
        kind="hung",
        initial_rank=rank,
        rank=rank,
        at=at,
        summary=f"rank {rank} hangs: {evidence}",
        detail=f"hangs: {evidence}",
    )


def _elsewhere(rank: int, at: float) -> FaultRecord:
    summary = "a rank of another node has failed"
    return FaultRecord(kind=ELSEWHERE, initial_rank=rank, rank=rank, at=at, summary=summary)


def _fault(error_file: Path, rank: int, how: ProcessEnd, at: float) -> FaultRecord:
    error = read_error(error_file)
    said = None if error is None else error.message
    return FaultRecord(
        kind="exception" if said else "died",
        initial_rank=rank,
        rank=rank,
        at=at,
        summary=said or f"rank {rank}: the process ended ({how})",
        detail=None if said else f"the process ended ({how})",
        traceback=None if error is None else error.traceback,
        gone=True,
    )
