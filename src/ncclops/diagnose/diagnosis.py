"""``ncclops diagnose``: a run on one page, from all of its records.

Joins the verdict, the latest incident, the flight recorders and the classifier. What is missing or
cannot be read becomes a note, never a failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any, Literal, TypeVar

from ncclops.diagnose.incident_report import IncidentReport, report_incident
from ncclops.diagnose.places import describe_operation
from ncclops.diagnose.recorder_findings import Recorded, analyse
from ncclops.errors import NcclopsError, UsageError
from ncclops.record import event_log, runs
from ncclops.record.document_kind import DocumentKind
from ncclops.record.events import EscalationEvent, Event, RestartEvent, RetryEvent
from ncclops.record.paths import EVENTS, RunPaths, numbered
from ncclops.record.run_record import RUN, RunRecord
from ncclops.record.verdict_record import VERDICT, FirstFailure, VerdictRecord
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import user_frame
from ncclops.stacks.parsing import traceback_frames

SCHEMA = "ncclops.diagnose/1"

Record = TypeVar("Record")

# running: its agent answers. lost: no verdict, and no agent on this machine.
State = Literal["running", "ended", "lost"]
_EVIDENCE_LINES = 5
# As torch writes it before each line of a traceback.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
# Restarts in place before this many seconds of an incident's time are those before it: the ranks'
# clock and the agent's are one on a node, and close on several.
_CLOCKS_S = 1.0


@dataclass(frozen=True)
class Step:
    """One thing that was tried: ``at`` in seconds since the epoch."""

    at: float
    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What happened to a run.

    ``outcome``, ``exit_code`` and ``reason`` are the verdict's, None before it. ``what`` is one
    sentence. ``rank``, ``host``, ``frame`` and ``operation`` say where it began, each None where
    that is not known or nothing failed. ``classification`` is the classifier's verdict with its
    ``evidence``. ``incident`` is the latest one, ``recovered`` whether the job went on after it.
    """

    run_dir: Path
    run_id: str
    state: State
    outcome: str | None
    exit_code: int | None
    reason: str | None
    what: str
    rank: int | None
    host: str | None
    frame: Frame | None
    operation: str | None
    classification: Mapping[str, Any] | None
    tried: tuple[Step, ...]
    incidents: int
    incident: IncidentReport | None
    recovered: bool
    recorded: Recorded | None
    receipt: str | None
    next_steps: tuple[str, ...]
    next_command: str
    notes: tuple[str, ...]

    @property
    def is_bad(self) -> bool:
        """Whether the run has failed, is lost, or stands in an incident that it has not left."""
        if self.state == "ended":
            return self.outcome in ("failed", "no-receipt")
        return self.state == "lost" or (self.incident is not None and not self.recovered)

    def to_json(self) -> dict[str, Any]:
        """The document ``ncclops.diagnose/1``."""
        plain = ("run_id", "state", "outcome", "exit_code", "reason", "what", "incidents")
        return {
            "schema": SCHEMA,
            "run_dir": str(self.run_dir),
            **{name: getattr(self, name) for name in plain},
            "culprit": {
                "rank": self.rank,
                "host": self.host,
                "frame": None if self.frame is None else self.frame.to_json(),
                "operation": self.operation,
            },
            "classification": self.classification,
            "tried": [vars(step) for step in self.tried],
            "incident": None if self.incident is None else self.incident.to_json(),
            "recovered": self.recovered,
            "recorded": None if self.recorded is None else self.recorded.to_json(),
            "receipt": self.receipt,
            "next_steps": list(self.next_steps),
            "next_command": self.next_command,
            "notes": list(self.notes),
        }


def diagnose(run_dir: str | PathLike[str]) -> Diagnosis:
    """Put together what is known of the run in ``run_dir``, under way or ended; any thread.

    Reads only. Raises ``UsageError`` if there is no run.
    """
    run = Path(run_dir).resolve()
    paths = RunPaths(run)
    notes: list[str] = []
    if not paths.holds_run():
        raise UsageError(f"{run} holds no run (no {EVENTS}): name a run directory")
    verdict = _document(VERDICT, paths.verdict, notes)
    started = _document(RUN, paths.run, notes)
    events = sorted(event_log.read(paths.events), key=lambda event: event.ts)
    state: State = "ended" if verdict is not None else "running" if runs.is_live(run) else "lost"
    report = _incident(run, notes)
    recovered = report is not None and _went_on(report, events)
    outcome = None if verdict is None else verdict.outcome
    failed = outcome == "failed" or state == "lost"
    explains = report is not None and not recovered and outcome != "completed"
    recorded = report.recorded if report is not None else analyse(run) if failed else None
    first = None if verdict is None else verdict.first_failure
    classified = None if verdict is None else verdict.classification
    found = None if classified is None else classified.to_json()
    if found is None and report is not None and explains:
        found = report.classification
    if found is None and failed:
        found = _classified(run, notes)
    rank, host, frame, operation = _where(report if explains else None, first, found)
    return Diagnosis(
        run_dir=run,
        run_id=_run_id(verdict) or _run_id(started) or run.name,
        state=state,
        outcome=outcome,
        exit_code=None if verdict is None else verdict.exit_code,
        reason=None if verdict is None else verdict.reason,
        what=_sentence(state, verdict, report if explains else None, recorded),
        rank=rank,
        host=host,
        frame=frame,
        operation=operation,
        classification=found,
        tried=tuple(_tried(events)),
        incidents=len(numbered(paths.incidents)),
        incident=report,
        recovered=recovered,
        recorded=recorded,
        receipt=_receipt(verdict),
        next_steps=_next_steps(
            report if explains else None, found, paths, rank if failed else None
        ),
        next_command=_next_command(run, state, outcome, report if explains else None, found),
        notes=tuple(notes),
    )


def _document(kind: DocumentKind[Record], path: Path, notes: list[str]) -> Record | None:
    try:
        return kind.read(path)
    except UsageError as error:
        notes.append(f"left out: {error}")
        return None


def _run_id(record: VerdictRecord | RunRecord | None) -> str | None:
    return None if record is None else record.run_id


def _incident(run: Path, notes: list[str]) -> IncidentReport | None:
    if not numbered(RunPaths(run).incidents):
        return None
    try:
        return report_incident(run, None)
    except (NcclopsError, OSError) as error:
        notes.append(f"the latest incident cannot be read: {error}")
        return None


def _went_on(report: IncidentReport, events: Sequence[Event]) -> bool:
    """Whether the job was started again, in place or in new processes, after the incident."""
    after = report.record.at - _CLOCKS_S
    # Where ranks left in a later incident, the restart in place after this one did not help.
    again = RetryEvent if report.left_in is not None else (RestartEvent, RetryEvent)
    return any(isinstance(each, again) and each.ts > after for each in events)


def _classified(run: Path, notes: list[str]) -> dict[str, Any] | None:
    """The classifier's verdict on all logs of the run, where it has one."""
    from ncclops.classify import classify_paths

    try:
        report = classify_paths([run])
    except NcclopsError as error:
        notes.append(f"the logs cannot be classified: {error}")
        return None
    if report.verdict.class_ in ("unknown", "healthy"):
        return None
    lines = [line.as_json() for line in report.evidence[:_EVIDENCE_LINES]]
    return report.verdict.as_json() | {"evidence": lines}


def _where(
    report: IncidentReport | None, first: FirstFailure | None, found: Mapping[str, Any] | None
) -> tuple[int | None, str | None, Frame | None, str | None]:
    """Rank, host, line of the user's code and operation, from the best source that has them."""
    if report is not None:
        culprit = report.culprit
        last = next((view.last for view in report.views if view.rank == culprit.rank), None)
        operation = None if last is None else describe_operation(last)
        return culprit.rank, culprit.host, culprit.frame, operation
    if first is None:
        return (found or {}).get("rank"), None, None, None
    tail = [_RANK_PREFIX.sub("", line) for line in first.tail]
    frame = user_frame(traceback_frames("\n".join(tail)))
    return first.rank, first.host or None, frame, None


def _sentence(
    state: State,
    verdict: VerdictRecord | None,
    report: IncidentReport | None,
    recorded: Recorded | None,
) -> str:
    if report is not None:
        return report.sentence
    if state == "running":
        return "the run is under way, and nothing is wrong that is on record"
    if verdict is not None:
        reason = verdict.reason or "no reason is on record"
        message = None if verdict.first_failure is None else verdict.first_failure.message
        return f"{reason}: {message}" if message and message not in reason else reason
    if recorded is not None:
        return recorded.sentence
    return "the run has no verdict, and no agent on this machine: it was killed, or is elsewhere"


def _tried(events: Sequence[Event]) -> Iterator[Step]:
    for event in events:
        match event:
            case RestartEvent():
                lost = f", without rank {', '.join(map(str, event.ranks_lost))}"
                what = f"restart {event.iteration} in place" + (lost if event.ranks_lost else "")
                yield Step(event.ts, what, event.cause)
            case EscalationEvent():
                to = "new processes" if event.to == "respawn" else "the end of the job"
                yield Step(event.ts, f"no further restart in place, but {to}", event.reason)
            case RetryEvent():
                yield Step(event.ts, f"attempt {event.attempt} in new processes", event.reason)


def _receipt(verdict: VerdictRecord | None) -> str | None:
    return None if verdict is None or verdict.receipt is None else verdict.receipt.verdict


def _next_steps(
    report: IncidentReport | None,
    found: Mapping[str, Any] | None,
    paths: RunPaths,
    rank: int | None,
) -> tuple[str, ...]:
    if report is not None:
        return report.next_steps
    steps = list((found or {}).get("remedy") or ())
    if rank is not None and (log := paths.rank(rank).stderr_log).exists():
        steps.append(f"read what rank {rank} wrote: {log}")
    return tuple(steps)


def _next_command(
    run: Path,
    state: State,
    outcome: str | None,
    report: IncidentReport | None,
    found: Mapping[str, Any] | None,
) -> str:
    """The command that shows more of what matters here."""
    name = quote(str(run))
    if state == "running":
        return f"ncclops {'status' if report is None else 'stacks'} {name}"
    if report is not None:
        return f"ncclops incident {name} {report.number}"
    if outcome == "no-receipt":
        return f"ncclops receipt check {name}"
    if outcome == "failed" or state == "lost":
        return f"ncclops {'classify' if found else 'bundle'} {name}"
    return f"ncclops report {name}"
