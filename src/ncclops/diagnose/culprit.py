"""Which rank began it: by its fault, the flight recorders, the stacks, or who waited for whom."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ncclops.diagnose.places import RankView
from ncclops.diagnose.recorder_findings import Recorded
from ncclops.flight.finding_kinds import FindingKind
from ncclops.record.events import Event, FaultEvent, WorkerStartedEvent
from ncclops.record.incident_record import ELSEWHERE, IncidentRecord
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import is_users, user_frame
from ncclops.stacks.parsing import traceback_frames
from ncclops.whole_numbers import whole_number

# The classifier's: what a rank shows that fails because of what another rank does, or does not do.
_MISMATCH, _WAITED = "collective-mismatch", ("watchdog-timeout", "watchdog-compile")
_MOST_CALLERS = 3
_HANGS = ("soft-timeout", "completion-timeout", "hung")
_IN_MONITORED_BARRIER = re.compile(r"(?:successfully reached|failed to pass) monitoredBarrier")
# What a rank says that has waited for others before a process group was made (worker.meeting).
_ABSENT_AT_START = "absent-rank"
_DID_NOT_COME = re.compile(
    r"waited (?P<waited>\d+ s) for ranks? (?P<rank>\d{1,9})\b[^\n]{0,2000}?"
    r" had not come to (?P<what>[^:\n]+)"
    r"(?:: rank (?P=rank) on (?P<host>[^\s;:]+)(?: is at (?P<place>[^;\n]+)|:? (?P<why>[^;\n]+))?)?"
)


@dataclass(frozen=True)
class Culprit:
    """The rank that began it, as far as the evidence shows; ``how`` it is known.

    ``callers`` are the user's frames that lead to ``frame``, the innermost first: many ranks share
    the line of a helper and differ only in what calls it. ``by_recorders``: the flight
    recorders and stacks name it, as ``how`` says. ``absent``: others waited where it did not come.
    ``waited``: it is not the one, but waited for it.
    """

    rank: int
    host: str | None
    frame: Frame | None
    how: str
    callers: tuple[Frame, ...] = ()
    by_recorders: bool = False
    absent: bool = False
    waited: bool = False

    @property
    def who(self) -> str:
        """The rank, and the host where that is known."""
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")


def is_hang(record: IncidentRecord) -> bool:
    """Whether a rank stood still; one that its monitor process ended for that is no crash."""
    return record.cause in _HANGS or (record.cause == "died" and record.timeout is not None)


def hosts_of(views: Sequence[RankView], events: Sequence[Event]) -> dict[int, str]:
    """Where the ranks were; of one that has ended, the agent that started it says it."""
    started = {e.rank: e.node for e in events if isinstance(e, WorkerStartedEvent) and e.node}
    elsewhere = {e.rank: e.on for e in events if isinstance(e, FaultEvent) and e.on}
    seen = {view.rank: view.host for view in views if view.host is not None}
    known = elsewhere | seen | started
    return {rank: host for rank, host in known.items() if rank is not None}


def find_culprit(
    record: IncidentRecord,
    views: Sequence[RankView],
    hosts: Mapping[int, str],
    recorded: Recorded | None,
) -> Culprit:
    """By the flight recorders where they explain it, else who was behind, else the first fault."""
    by_rank = {view.rank: view for view in views}
    rank, how = record.first_faulty_rank, "its fault was the first that follows from no other"
    if recorded is not None and explains(recorded, record):
        return recorded_culprit(views, hosts, recorded)
    if is_hang(record) and (behind := _behind(views)) is not None:
        rank, how = behind
    view = by_rank.get(rank)
    frames = _raised_through(record, rank)
    if user_frame(frames) is None and view is not None:
        frames = view.frames
    frame = user_frame(frames)
    if frame is None and recorded is not None and recorded.kind == FindingKind.RANK_DIED:
        frame = recorded.frame if recorded.culprits[:1] == (rank,) else None  # its last output
    callers = _callers(frame, frames)
    return Culprit(rank, hosts.get(rank), frame, how, callers)


def _callers(frame: Frame | None, frames: Sequence[Frame]) -> tuple[Frame, ...]:
    outer = frames[frames.index(frame) + 1 :] if frame in frames else ()
    return tuple(filter(is_users, outer))[:_MOST_CALLERS]


def recorded_culprit(
    views: Sequence[RankView], hosts: Mapping[int, str], recorded: Recorded
) -> Culprit:
    """The first rank that the recorders name; ``recorded`` has one."""
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
    return Culprit(rank, hosts.get(rank), frame, how, callers, by_recorders=True)


def explains(recorded: Recorded, record: IncidentRecord) -> bool:
    """Whether what the recorders say is what the incident is about."""
    if not recorded.culprits or not recorded.hung:
        return False
    # That a rank which its monitor process has ended is gone, explains nothing.
    return is_hang(record) and recorded.kind != FindingKind.RANK_DIED


def failed_of_another(
    record: IncidentRecord, found: dict[str, Any] | None, recorded: Recorded
) -> bool:
    """Whether the first rank that failed did so because of another rank's call, or for its want."""
    if recorded.is_mismatch and not is_hang(record):
        return found is not None and found["class"] in (_MISMATCH, *_WAITED)
    came = recorded.kind in (FindingKind.NEVER_ARRIVED, FindingKind.CROSS_GROUP_DEADLOCK)
    return came and bool(recorded.culprits) and failed_waiting(record, found)


def failed_waiting(record: IncidentRecord, found: dict[str, Any] | None) -> bool:
    """Whether the first rank that failed had waited too long for the others.

    In a monitored barrier one rank waits, and the others fail when it has ended.
    """
    if is_hang(record):
        return False
    in_barrier = _IN_MONITORED_BARRIER.search(record.exception or "") is not None
    return in_barrier or (found is not None and found["class"] in _WAITED)


def find_absent(
    record: IncidentRecord, views: Sequence[RankView], hosts: Mapping[int, str]
) -> Culprit | None:
    """The rank that was not in any collective when another one had waited too long in one.

    By stacks alone: of a rank that has ended, or that is elsewhere, there is no recorder.
    """
    alive = [view for view in views if view.frames]
    if record.cause != ELSEWHERE:
        alive = [view for view in alive if view.rank != record.first_faulty_rank]
    outside = [view for view in alive if view.doing is None and view.frame is not None]
    if not outside:
        return None
    view = min(outside, key=lambda view: (_reached(view), view.rank))
    how = "by the stacks: it was in no collective when another rank had waited too long in one"
    callers = _callers(view.frame, view.frames)
    return Culprit(view.rank, hosts.get(view.rank), view.frame, how, callers, absent=True)


def did_not_come(record: IncidentRecord, found: dict[str, Any] | None) -> re.Match[str] | None:
    """What the first rank that failed says of those that it waited for before a group was made."""
    if found is None or found["signature"] != _ABSENT_AT_START:
        return None
    return _DID_NOT_COME.search(record.exception or "")


def who_did_not_come(
    missed: re.Match[str], views: Sequence[RankView], hosts: Mapping[int, str]
) -> Culprit:
    """The rank that ``did_not_come`` has found."""
    rank = int(missed["rank"])
    view = next((view for view in views if view.rank == rank), None)
    frames = () if view is None else view.frames
    frame = None if view is None else view.frame
    if frame is None and missed["place"]:
        file, _, rest = missed["place"].rpartition(":")
        line, _, function = rest.partition(" in ")
        frame = Frame(file, whole_number(line) or 0, function.partition(",")[0])
    how = "the other ranks of a process group waited for it before the group was made"
    host = hosts.get(rank) or missed["host"]
    return Culprit(rank, host, frame, how, _callers(frame, frames))


def _raised_through(record: IncidentRecord, rank: int) -> tuple[Frame, ...]:
    """By the traceback of the first faulty rank; the innermost first."""
    if rank != record.first_faulty_rank or not record.traceback:
        return ()
    return traceback_frames(record.traceback)


def _behind(views: Sequence[RankView]) -> tuple[int, str] | None:
    """The rank that others wait for, by what each entered last and where its main thread is."""
    waiting = [view for view in views if view.last is not None and view.last.pending]
    if not waiting:
        return None
    group, _ = Counter(view.last.name for view in waiting if view.last).most_common(1)[0]
    reached = max(view.last.seq for view in waiting if view.last and view.last.name == group)
    others = [view for view in views if view not in waiting]
    late = [view for view in others if view.last is None or view.last.seq < reached]
    if not late:
        return None
    # A rank that does not even answer is the more likely cause.
    first = min(late, key=lambda view: (view.last is not None, _reached(view), view.rank))
    return first.rank, f"{_count(waiting)} in a collective that it has not entered"


def _count(waiting: Sequence[RankView]) -> str:
    return "1 rank waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"


def _reached(view: RankView) -> int:
    return view.last.seq if view.last is not None else 0
