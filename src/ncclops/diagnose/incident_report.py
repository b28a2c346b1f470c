"""``ncclops incident``: what happened, on one page, from what an incident left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops.diagnose import advice, escalated, log_evidence, places
from ncclops.diagnose.incident_events import (
    DecisionTaken,
    WorkerEnd,
    decision_on,
    worker_end,
)
from ncclops.diagnose.places import Cluster, RankView
from ncclops.diagnose.recorder_findings import Recorded, analyse
from ncclops.errors import UsageError
from ncclops.flight.finding_kinds import FindingKind
from ncclops.rank_lists import rank_list
from ncclops.record import event_log, incident_record, snapshot_files
from ncclops.record.incident_record import IncidentRecord
from ncclops.record.paths import INCIDENT, RunPaths, numbered
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import is_users, user_frame
from ncclops.stacks.parsing import traceback_frames

_MISMATCH = "collective-mismatch"  # the classifier's
_MOST_CALLERS = 3
_ENDED_IT = "; its monitor process ended it"
_HANGS = ("soft-timeout", "completion-timeout", "hung")


@dataclass(frozen=True)
class Culprit:
    """The rank that began it, as far as the evidence shows; ``how`` it is known.

    ``callers`` are the user's frames that lead to ``frame``, the innermost first: many ranks share
    the line of a helper and differ only in what calls it. ``by_recorders``: the flight
    recorders and stacks name it, as ``how`` says.
    """

    rank: int
    host: str | None
    frame: Frame | None
    how: str
    callers: tuple[Frame, ...] = ()
    by_recorders: bool = False


@dataclass(frozen=True)
class IncidentReport:
    """One incident, explained. ``record`` is its incident.json.

    ``left_in`` is the incident in which its ranks left restarts in place, if that one was
    requested: it is a consequence of this one.
    """

    number: int
    directory: Path
    record: IncidentRecord
    sentence: str
    culprit: Culprit
    classification: dict[str, Any] | None
    recorded: Recorded | None
    decision: DecisionTaken
    next_steps: tuple[str, ...]
    views: tuple[RankView, ...]
    clusters: tuple[Cluster, ...]
    left_in: int | None = None

    @property
    def timeline_ms(self) -> list[tuple[str, float]]:
        """The phases in their order, with the milliseconds each took on the rank that wrote it."""
        return list(self.record.phases_ms.items())

    def to_json(self) -> dict[str, Any]:
        """``ncclops.incident/1``: the record, and what is made of it."""
        culprit = self.culprit
        frame = None if culprit.frame is None else culprit.frame.to_json()
        return self.record.to_json() | {
            "number": self.number,
            "directory": str(self.directory),
            "sentence": self.sentence,
            "culprit": {
                "rank": culprit.rank,
                "host": culprit.host,
                "frame": frame,
                "callers": [caller.to_json() for caller in culprit.callers],
                "how": culprit.how,
            },
            "classification": self.classification,
            "recorded": None if self.recorded is None else self.recorded.to_json(),
            "decision": vars(self.decision),
            "left_in": self.left_in,
            "next_steps": list(self.next_steps),
            "clusters": [cluster.to_json() for cluster in self.clusters],
            "missing": {str(view.rank): view.reason for view in self.views if view.reason},
        }


def report_incident(run: Path, number: int | None) -> IncidentReport:
    """Incident ``number`` of ``run``, the latest by default.

    Where ranks left because restarts in place could not help, that is the fault before.
    Raises ``UsageError`` when there is no such incident.
    """
    paths = RunPaths(run)
    parent = paths.incidents
    asked = _number(paths, number)
    fault = escalated.fault_before(parent, asked)
    directory = parent / str(asked if fault is None else fault)
    record = _record(directory)
    views = tuple(places.read_rank(directory, rank) for rank in snapshot_files.ranks_in(directory))
    events = event_log.read(paths.events)
    recorded = analyse(directory)
    culprit = _culprit(record, views, recorded)
    failed, end = culprit.rank, None
    if failed in record.ranks_lost and not _is_hang(record):
        end = worker_end(events, failed, record.at - 60)
    found = log_evidence.classify_rank(
        run,
        directory,
        failed,
        said=record.traceback or record.exception,
        end=end,
    )
    sentence = _sentence(record, culprit, views, recorded, end)
    if recorded is not None and recorded.is_mismatch and _failed_of_mismatch(record, found):
        culprit = _recorded_culprit(views, recorded)
        sentence = recorded.sentence + _consequence(culprit, failed, end)
    return IncidentReport(
        number=int(directory.name),
        directory=directory,
        record=record,
        sentence=sentence,
        culprit=culprit,
        classification=found,
        recorded=recorded,
        decision=decision_on(
            record, events, until=escalated.next_fault_at(parent, int(directory.name))
        ),
        next_steps=_next_steps(paths, directory, record, culprit, failed, found, recorded),
        views=views,
        clusters=tuple(places.cluster(views)),
        left_in=None if fault is None else asked,
    )


def _number(paths: RunPaths, number: int | None) -> int:
    run, known = paths.root, numbered(paths.incidents)
    if not known:
        raise UsageError(f"{run} has no incidents: nothing failed there, or it kept no record")
    wanted = known[-1] if number is None else number
    if wanted not in known:
        raise UsageError(f"{run} has no incident {wanted}: it has {rank_list(known)}")
    return wanted


def _record(directory: Path) -> IncidentRecord:
    record = incident_record.read(directory)
    if record is not None:
        return record
    raise UsageError(
        f"{directory} has snapshots and no {INCIDENT}: the run ended before it was"
        " written;"
        f" try `ncclops flight analyze {directory}`"
    )


def _is_hang(record: IncidentRecord) -> bool:
    """Whether a rank stood still; one that its monitor process ended for that is no crash."""
    return record.cause in _HANGS or (record.cause == "died" and record.timeout is not None)


# --- who ------------------------------------------------------------------------------------------


def _culprit(
    record: IncidentRecord, views: Sequence[RankView], recorded: Recorded | None
) -> Culprit:
    by_rank = {view.rank: view for view in views}
    rank, how = record.first_faulty_rank, "its fault was the first that follows from no other"
    if recorded is not None and _explains(recorded, record):
        return _recorded_culprit(views, recorded)
    if _is_hang(record) and (behind := _behind(views)) is not None:
        rank, how = behind
    view = by_rank.get(rank)
    frames = _raised_through(record, rank)
    if user_frame(frames) is None and view is not None:
        frames = view.frames
    frame = user_frame(frames)
    if frame is None and recorded is not None and recorded.kind == FindingKind.RANK_DIED:
        frame = recorded.frame if recorded.culprits[:1] == (rank,) else None  # its last output
    callers = _callers(frame, frames)
    return Culprit(rank, view.host if view is not None else None, frame, how, callers)


def _callers(frame: Frame | None, frames: Sequence[Frame]) -> tuple[Frame, ...]:
    outer = frames[frames.index(frame) + 1 :] if frame in frames else ()
    return tuple(filter(is_users, outer))[:_MOST_CALLERS]


def _recorded_culprit(views: Sequence[RankView], recorded: Recorded) -> Culprit:
    rank = recorded.culprits[0]
    view = next((view for view in views if view.rank == rank), None)
    # After a disagreement the rank may have gone on; a rank that never came is where it stands.
    frame = recorded.frame if recorded.is_mismatch else None
    callers = recorded.callers[:_MOST_CALLERS]
    if frame is None and view is not None:
        frame, callers = view.frame, _callers(view.frame, view.frames)
    how = f"by the flight recorders and stacks: {recorded.kind}"
    if frame is None and recorded.is_mismatch and recorded.others_frame is not None:
        how += f"; it left no line of its own, the others called it at {recorded.others_frame}"
    host = view.host if view is not None else None
    return Culprit(rank, host, frame, how, callers, by_recorders=True)


def _explains(recorded: Recorded, record: IncidentRecord) -> bool:
    """Whether what the recorders say is what the incident is about."""
    if not recorded.culprits or not recorded.hung:
        return False
    # That a rank which its monitor process has ended is gone, explains nothing.
    return _is_hang(record) and recorded.kind != FindingKind.RANK_DIED


def _failed_of_mismatch(record: IncidentRecord, found: dict[str, Any] | None) -> bool:
    """Whether the first rank that failed did so because of another rank's call."""
    return not _is_hang(record) and found is not None and found["class"] == _MISMATCH


def _consequence(culprit: Culprit, failed: int, end: WorkerEnd | None) -> str:
    if failed == culprit.rank:
        return ""  # the recorders show its end
    how = "" if end is None else f" ({end})"
    return f"; rank {failed} failed of it{how}"


def _raised_through(record: IncidentRecord, rank: int) -> tuple[Frame, ...]:
    """By the traceback of the first faulty rank; the innermost first."""
    if rank != record.first_faulty_rank or not record.traceback:
        return ()
    return traceback_frames(record.traceback)


def _behind(views: Sequence[RankView]) -> tuple[int, str] | None:
    """The rank that others wait for, by what each entered last and where its main thread is."""
    waiting = [view for view in views if view.last is not None and view.last["pending"]]
    if not waiting:
        return None
    group, _ = Counter(view.last["name"] for view in waiting if view.last).most_common(1)[0]
    reached = max(view.last["seq"] for view in waiting if view.last and view.last["name"] == group)
    others = [view for view in views if view not in waiting]
    late = [view for view in others if view.last is None or view.last["seq"] < reached]
    if not late:
        return None
    # A rank that does not even answer is the more likely cause.
    first = min(late, key=lambda view: (view.last is not None, _reached(view), view.rank))
    return first.rank, f"{_count(waiting)} in a collective that it has not entered"


def _count(waiting: Sequence[RankView]) -> str:
    return "1 rank waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"


def _reached(view: RankView) -> int:
    return view.last["seq"] if view.last is not None else 0


# --- in words -------------------------------------------------------------------------------------


def _sentence(
    record: IncidentRecord,
    culprit: Culprit,
    views: Sequence[RankView],
    recorded: Recorded | None,
    end: WorkerEnd | None,
) -> str:
    who = f"rank {culprit.rank}" + (f" on {culprit.host}" if culprit.host else "")
    at = f" at {culprit.frame}" if culprit.frame is not None else ""
    if _is_hang(record):
        ended = culprit.rank in record.ranks_lost
        if recorded is not None and _explains(recorded, record):
            return recorded.sentence + _ENDED_IT * (ended and not recorded.ended_for_silence)
        return _hang_sentence(who, culprit, views) + _ENDED_IT * ended
    if record.cause in ("died", "lost"):
        how = "" if end is None else f" ({end})"
        return f"{who} is gone{how}: {_detail(record)}" + (at and f"; it was{at}")
    if record.exception:
        return f"{who} raised {record.exception}{at}"
    return f"{who}: {_detail(record)}{at}"


def _hang_sentence(who: str, culprit: Culprit, views: Sequence[RankView]) -> str:
    waiting = [v for v in views if v.rank != culprit.rank and v.last and v.last["pending"]]
    where = f"it was at {culprit.frame}" if culprit.frame is not None else "where it was is unknown"
    if not waiting or waiting[0].last is None:
        return f"{who} made no progress: {where}"
    last = waiting[0].last
    ranks = rank_list([view.rank for view in waiting])
    plural = "s" if len(waiting) > 1 else ""
    return (
        f"{who} never entered {places.describe_operation(last)}, "
        f"in which rank{plural} {ranks} waited: {where}"
    )


def _next_steps(
    paths: RunPaths,
    directory: Path,
    record: IncidentRecord,
    culprit: Culprit,
    rank: int,
    found: dict[str, Any] | None,
    recorded: Recorded | None,
) -> tuple[str, ...]:
    steps = []
    if recorded is not None and culprit.by_recorders:
        steps += advice.steps(
            recorded.kind,
            "rank" + "s" * (len(recorded.culprits) > 1) + f" {rank_list(recorded.culprits)}",
            None if culprit.frame is None else str(culprit.frame),
            in_data_loader=recorded.in_data_loader,
        )
    steps += found["remedy"] if found else []
    if _is_hang(record):
        steps.append(f"compare what each rank enqueued: ncclops flight analyze {directory}")
        steps.append("if it hangs again, look at it while it does: ncclops stacks")
    if record.cause in ("died", "lost") and not found and not _is_hang(record):
        steps.append(
            "look at the kernel's log of that node around that time (dmesg -T): the OOM killer and"
            " Xid errors leave nothing else"
        )
    log = paths.rank(rank).stderr_log
    if log.exists():
        steps.append(f"read what rank {rank} wrote: {log}")
    return tuple(steps)


def _detail(record: IncidentRecord) -> str:
    """What happened, without the rank's number; records of older versions have the summary only."""
    return record.detail or record.summary
