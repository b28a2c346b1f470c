"""``ncclops incident``: what happened, on one page, from what an incident left behind."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ncclops.diagnose import advice, escalated, log_evidence, places
from ncclops.diagnose.culprit import (
    Culprit,
    did_not_come,
    explains,
    failed_of_another,
    failed_waiting,
    find_absent,
    find_culprit,
    hosts_of,
    is_hang,
    recorded_culprit,
    who_did_not_come,
)
from ncclops.diagnose.incident_events import (
    CLOCKS_DIFFER_S,
    DecisionTaken,
    WorkerEnd,
    advice_on,
    decision_on,
    gpu_faults,
    worker_end,
)
from ncclops.diagnose.places import Cluster, RankView
from ncclops.diagnose.recorder_findings import Recorded, analyse
from ncclops.errors import UsageError
from ncclops.rank_lists import rank_list
from ncclops.record import event_log, incident_record, snapshot_files
from ncclops.record.event_values import GpuFault
from ncclops.record.incident_record import ELSEWHERE, IncidentRecord
from ncclops.record.paths import INCIDENT, RunPaths, numbered
from ncclops.stacks.parsing import traceback_frames

# What `flight analyze` reads.
_ANALYSED = (*snapshot_files.FLIGHTS, snapshot_files.STACKS)
_MOST_CHARS = 300
# An exception begins with its type; the text that a script ends itself with does not.
_NAMED = re.compile(r"[A-Za-z_][\w.]*(?::|$)")
# What was handed to `sys.exit`: a number, or text.
_LAST_WORDS = re.compile(r"SystemExit: (?:(?P<code>-?\d+)\b|(?P<text>.*))", re.DOTALL)
# Which of them it was, nothing says: where a disk is full, no note of that can be written either.
NOT_WRITTEN = "the run ended before it was written, or its file system took no more"
_ENDED_IT = "; its monitor process ended it"


@dataclass(frozen=True)
class IncidentReport:
    """One incident, explained. ``record`` is its incident.json.

    ``left_in`` is the incident in which its ranks left restarts in place, if that one was
    requested: it is a consequence of this one. ``advice`` is what to do, ``log`` what to read then.
    """

    number: int
    directory: Path
    record: IncidentRecord
    sentence: str
    culprit: Culprit
    classification: dict[str, Any] | None
    recorded: Recorded | None
    decision: DecisionTaken
    advice: tuple[str, ...]
    log: Path | None
    views: tuple[RankView, ...]
    clusters: tuple[Cluster, ...]
    left_in: int | None = None
    gpu_faults: tuple[GpuFault, ...] = ()

    @property
    def next_steps(self) -> tuple[str, ...]:
        """The advice, and the log of the rank that failed."""
        if self.log is None:
            return self.advice
        return (*self.advice, f"read what rank {self.log.parent.name} wrote: {self.log}")

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
            "gpu_faults": [msgspec.to_builtins(fault) for fault in self.gpu_faults],
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
    hosts = hosts_of(views, events)
    shown = find_culprit(record, views, hosts, recorded)
    failed, end = shown.rank, None
    if failed in record.ranks_lost and not is_hang(record):
        end = worker_end(events, failed, record.at - 60)
    found = log_evidence.classify_rank(
        run,
        directory,
        failed,
        # Of a rank that stood still these are its stacks, and nothing was raised.
        said=None if is_hang(record) else _said(record),
        end=end,
    )
    blamed = _blamed_instead(record, shown, views, hosts, recorded, found, end)
    culprit, sentence = blamed or (shown, _sentence(record, shown, views, recorded, end))
    until = escalated.next_fault_at(parent, int(directory.name))
    ranks = {culprit.rank, *record.faulty_ranks, *record.ranks_lost}
    broken = gpu_faults(events, ranks, record.at - CLOCKS_DIFFER_S, until)
    # Whatever was raised is a consequence.
    sentence = "; ".join([*(f"rank {fault.rank}: {fault}" for fault in broken), sentence])
    steps = advice.on_incident(
        directory,
        record,
        found,
        recorded if culprit.by_recorders else None,
        rank=culprit.rank,
        line=None if culprit.frame is None else str(culprit.frame),
        absent=culprit.absent,
        is_hang=is_hang(record),
    )
    log = paths.rank(failed).stderr_log
    return IncidentReport(
        number=int(directory.name),
        directory=directory,
        record=record,
        sentence=sentence,
        culprit=culprit,
        classification=found,
        recorded=recorded,
        decision=decision_on(record, events, until=until),
        advice=(*advice_on(broken), *steps),
        log=log if log.exists() else None,
        views=views,
        clusters=tuple(places.cluster(views)),
        left_in=None if fault is None else asked,
        gpu_faults=broken,
    )


def _blamed_instead(
    record: IncidentRecord,
    shown: Culprit,
    views: Sequence[RankView],
    hosts: Mapping[int, str],
    recorded: Recorded | None,
    found: dict[str, Any] | None,
    end: WorkerEnd | None,
) -> tuple[Culprit, str] | None:
    """Who began it, and the sentence that says so, where the one that is ``shown`` only failed of
    another rank or waited for it; None where it is the one."""
    if recorded is not None and failed_of_another(record, found, recorded):
        culprit = recorded_culprit(views, hosts, recorded)
        consequence = _consequence(culprit, shown.rank, end)
        return culprit, _recorded_sentence(recorded, culprit) + consequence
    if (missed := did_not_come(record, found)) is not None:
        culprit = who_did_not_come(missed, views, hosts)
        return culprit, _missing_sentence(culprit, missed, record)
    if record.cause != ELSEWHERE and not failed_waiting(record, found):
        return None
    absent = find_absent(record, views, hosts)
    if absent is not None:
        return absent, _absence_sentence(absent, record)
    culprit = replace(shown, waited=True)
    if record.cause == ELSEWHERE:
        return culprit, f"{record.summary}; none of this one is known to be the cause"
    return culprit, _sentence(record, shown, views, recorded, end)


def _number(paths: RunPaths, number: int | None) -> int:
    run, known = paths.root, numbered(paths.incidents)
    if not known:
        raise UsageError(
            f"{run} has no incidents: nothing failed there, or it kept no record; `ncclops stacks`"
            " shows where the ranks of a run under way are"
        )
    wanted = known[-1] if number is None else number
    if wanted not in known:
        raise UsageError(f"{run} has no incident {wanted}: it has {rank_list(known)}")
    return wanted


def _record(directory: Path) -> IncidentRecord:
    record = incident_record.read(directory)
    if record is not None:
        return record
    there = (f"rank*/{name}" for name in _ANALYSED)
    is_shown = any(any(directory.glob(pattern)) for pattern in there)
    command = f"flight analyze {directory}" if is_shown else "diagnose"
    why = f"{directory} has no {INCIDENT}: {NOT_WRITTEN}"
    if os.path.lexists(directory / INCIDENT):
        why = f"{directory / INCIDENT} is damaged"
    raise UsageError(f"{why}; try `ncclops {command}`")


# --- in words -------------------------------------------------------------------------------------


def _consequence(culprit: Culprit, failed: int, end: WorkerEnd | None) -> str:
    if failed == culprit.rank:
        return ""  # the recorders show its end
    how = "" if end is None else f" ({end})"
    return f"; rank {failed} failed of it{how}"


def _sentence(
    record: IncidentRecord,
    culprit: Culprit,
    views: Sequence[RankView],
    recorded: Recorded | None,
    end: WorkerEnd | None,
) -> str:
    who = culprit.who
    at = f" at {culprit.frame}" if culprit.frame is not None else ""
    if is_hang(record):
        ended = culprit.rank in record.ranks_lost
        if recorded is not None and explains(recorded, record):
            by_monitor = ended and not recorded.ended_for_silence
            return _recorded_sentence(recorded, culprit) + _ENDED_IT * by_monitor
        return _hang_sentence(who, culprit, views) + _ENDED_IT * ended
    if record.cause in ("died", "lost"):
        how = "" if end is None else f" ({end})"
        detail = "" if f"({end})" in _detail(record) else f": {_detail(record)}"
        return f"{who} is gone{how}{detail}" + (at and f"; it was{at}")
    if record.exception:
        said = _in_a_line(record.exception)
        if (last_words := _LAST_WORDS.match(said)) is not None:
            code = last_words["code"]
            said = f"exit code {code}{said[last_words.end() :]}" if code else last_words["text"]
            return f"{who} ended: {said}{at}"
        return f"{who} {'raised' if _NAMED.match(said) else 'ended:'} {said}{at}"
    return f"{who}: {_detail(record)}{at}"


def _recorded_sentence(recorded: Recorded, culprit: Culprit) -> str:
    """The recorders' sentence, with the host of the rank that it begins with."""
    who = f"rank {culprit.rank} "
    if culprit.host is None or not recorded.sentence.startswith(who):
        return recorded.sentence
    return f"{who}on {culprit.host} {recorded.sentence.removeprefix(who)}"


def _missing_sentence(culprit: Culprit, missed: re.Match[str], record: IncidentRecord) -> str:
    who = culprit.who
    where = f": it was at {culprit.frame}" if culprit.frame is not None else ""
    if not where and missed["why"]:
        where = f": {missed['why']}"
    waiting = f"rank {record.first_faulty_rank} waited {missed['waited']}"
    return f"{who} did not come to {missed['what']}, for which {waiting}{where}"


def _absence_sentence(culprit: Culprit, record: IncidentRecord) -> str:
    who = culprit.who
    waiting = f"rank {record.first_faulty_rank}"
    if record.cause == ELSEWHERE:
        waiting = "a rank of another node"
    operation = places.doing(traceback_frames(record.traceback or "")) or "a collective"
    where = f"it was at {culprit.frame}"
    return f"{who} did not come to {operation}, in which {waiting} waited too long: {where}"


def _hang_sentence(who: str, culprit: Culprit, views: Sequence[RankView]) -> str:
    waiting = [v for v in views if v.rank != culprit.rank and v.last and v.last.pending]
    where = f"it was at {culprit.frame}" if culprit.frame is not None else "where it was is unknown"
    if not waiting or waiting[0].last is None:
        return f"{who} made no progress: {where}"
    last = waiting[0].last
    ranks = rank_list([view.rank for view in waiting])
    plural = "s" if len(waiting) > 1 else ""
    own = next((view.last for view in views if view.rank == culprit.rank), None)
    came = own is not None and (own.name, own.op) == (last.name, last.op) and own.seq >= last.seq
    did, too = ("made no progress in", " too") if came else ("never entered", "")
    return (
        f"{who} {did} {places.describe_operation(last)}, "
        f"in which rank{plural} {ranks} waited{too}: {where}"
    )


def _said(record: IncidentRecord) -> str | None:
    """What the rank has reported. Of a bare exit code the frames say nothing of what failed."""
    bare = _LAST_WORDS.fullmatch(record.exception or "")
    return record.exception if bare and bare["code"] else record.traceback or record.exception


def _in_a_line(exception: str) -> str:
    """Its first line, and what failed in another process whose traceback it quotes."""
    lines = [line for line in exception.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    inner = [n for n, line in enumerate(lines) if line.startswith(" ")]
    there = lines[inner[-1] + 1 : inner[-1] + 2] if inner else []
    return " ".join([first, *there])[:_MOST_CHARS]


def _detail(record: IncidentRecord) -> str:
    """What happened, without the rank's number; records of older versions have the summary only."""
    return record.detail or record.summary
