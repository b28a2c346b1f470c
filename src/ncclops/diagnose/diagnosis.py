"""``ncclops diagnose``: a run on one page, from all of its records.

Joins the verdict, the latest incident, the flight recorders and the classifier. What is missing or
cannot be read becomes a note, never a failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any, Literal, TypeVar

import msgspec

from ncclops.diagnose.incident_events import advice_on
from ncclops.diagnose.incident_report import NOT_WRITTEN, IncidentReport, report_incident
from ncclops.diagnose.recorder_findings import Recorded, analyse
from ncclops.diagnose.story import complete, tell, tried, went_on
from ncclops.durations import format_rounded
from ncclops.errors import NcclopsError, UsageError
from ncclops.given_path import given_path
from ncclops.record import event_log, incident_record, runs
from ncclops.record.document_kind import DocumentKind
from ncclops.record.event_values import GpuFault
from ncclops.record.events import (
    BootstrappedEvent,
    CompileWarmupEvent,
    Event,
    GpuFaultEvent,
    StepEvent,
    WorkerStartedEvent,
)
from ncclops.record.paths import INCIDENT, RunPaths, numbered
from ncclops.record.run_record import RUN, RunRecord
from ncclops.record.story_record import Story, TriedStep
from ncclops.record.verdict_record import VERDICT, VerdictRecord
from ncclops.stacks.frame import Frame
from ncclops.status.compare import WithoutStep, without_step
from ncclops.status.run_list import is_under_way

SCHEMA = "ncclops.diagnose/1"

Record = TypeVar("Record")

# running: its agent answers. lost: no verdict, and no agent on this machine.
State = Literal["running", "ended", "lost"]
_EVIDENCE_LINES = 5
# What shows that ranks of a start have met, or work without meeting.
_BEGUN = (BootstrappedEvent, CompileWarmupEvent, StepEvent)
# Imports take seconds, more from a file system of many nodes.
_STARTS_WITHIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What happened to a run.

    ``outcome``, ``exit_code`` and ``reason`` are the verdict's, None before it. ``what`` is one
    sentence. ``classification`` is the classifier's verdict with its
    ``evidence``. ``story`` tells it as the end of the run did, None where nothing failed.
    ``incident`` is the latest one, ``recovered`` whether the job went on after it.
    ``gpu_faults`` are the GPUs that made ranks fail. ``without_step`` are ranks of a run under way
    that make no steps.
    """

    run_dir: Path
    run_id: str
    state: State
    outcome: str | None
    exit_code: int | None
    reason: str | None
    what: str
    story: Story | None
    classification: Mapping[str, Any] | None
    tried: tuple[TriedStep, ...]
    incidents: int
    incident: IncidentReport | None
    recovered: bool
    recorded: Recorded | None
    receipt: str | None
    next_steps: tuple[str, ...]
    next_command: str
    notes: tuple[str, ...]
    gpu_faults: tuple[GpuFault, ...] = ()
    without_step: WithoutStep | None = None

    @property
    def rank(self) -> int | None:
        """The rank that began it."""
        return None if self.story is None else self.story.rank

    @property
    def host(self) -> str | None:
        """Where that rank was."""
        return None if self.story is None else self.story.host

    @property
    def operation(self) -> str | None:
        """The collective that it entered last."""
        return None if self.story is None else self.story.operation

    @property
    def frame(self) -> Frame | None:
        """The line of the user's code at which it was."""
        if self.story is None or not self.story.code:
            return None
        line = self.story.code[-1]
        return Frame(line.file, line.line, line.function)

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
            "story": None if self.story is None else msgspec.to_builtins(self.story),
            "classification": self.classification,
            "tried": [msgspec.to_builtins(step) for step in self.tried],
            "incident": None if self.incident is None else self.incident.to_json(),
            "recovered": self.recovered,
            "recorded": None if self.recorded is None else self.recorded.to_json(),
            "receipt": self.receipt,
            "next_steps": list(self.next_steps),
            "next_command": self.next_command,
            "notes": list(self.notes),
            "without_step": None if self.without_step is None else asdict(self.without_step),
            "gpu_faults": [msgspec.to_builtins(fault) for fault in self.gpu_faults],
        }


def diagnose(run_dir: str | PathLike[str]) -> Diagnosis:
    """Put together what is known of the run in ``run_dir``, under way or ended; any thread.

    Reads only. Raises ``UsageError`` if there is no run.
    """
    run = given_path(run_dir, "a run directory").resolve()
    paths = RunPaths(run)
    notes: list[str] = []
    if not paths.holds_run():
        raise runs.no_run(run)
    verdict = _document(VERDICT, paths.verdict, notes)
    started = _document(RUN, paths.run, notes)
    events = sorted(event_log.read(paths.events), key=lambda event: event.ts)
    state = _state(run, verdict, started)
    report = _incident(run, notes)
    recovered = report is not None and went_on(report, events)
    outcome = None if verdict is None else verdict.outcome
    failed = outcome == "failed" or state == "lost"
    blamed = None if recovered or outcome == "completed" else report
    recorded = None if report is None else report.recorded
    if report is None and failed:
        recorded = analyse(run)
    found = _classification(run, verdict, blamed, failed, notes)
    broken = _gpu_faults(verdict, events)
    lost = [] if verdict is None else verdict.ranks_lost
    story = None if verdict is None else verdict.story
    if story is None and (failed or blamed is not None):
        story = _story(run, verdict, blamed, found, events, broken)
    waited_s = without_group_s(events, time.time()) if state == "running" else None
    return Diagnosis(
        run_dir=run,
        run_id=_run_id(verdict) or _run_id(started) or run.name,
        state=state,
        outcome=outcome,
        exit_code=None if verdict is None else verdict.exit_code,
        reason=None if verdict is None else verdict.reason,
        what=_sentence(state, verdict, recorded, waited_s) if story is None else story.what,
        story=story,
        classification=found,
        tried=tuple(tried(events)),
        incidents=len(numbered(paths.incidents)),
        incident=report,
        recovered=recovered,
        recorded=recorded,
        receipt=_receipt(verdict),
        next_steps=tuple(advice_on(broken)) if story is None else tuple(story.next_steps),
        next_command=_next_command(run, state, outcome, story, lost, waited_s),
        notes=tuple(notes),
        gpu_faults=broken,
        without_step=_without_step(run) if state == "running" else None,
    )


def _state(run: Path, verdict: VerdictRecord | None, started: RunRecord | None) -> State:
    if verdict is not None:
        return "ended"
    launcher = None if started is None else started.launcher
    return "running" if is_under_way(run, launcher) else "lost"


def _classification(
    run: Path,
    verdict: VerdictRecord | None,
    blamed: IncidentReport | None,
    failed: bool,
    notes: list[str],
) -> Mapping[str, Any] | None:
    """What the verdict says, before it the incident, and without either what the logs say."""
    if verdict is not None and verdict.classification is not None:
        return verdict.classification.to_json()
    if blamed is not None and blamed.classification is not None:
        return blamed.classification
    return _classified(run, notes) if failed else None


def _story(
    run: Path,
    verdict: VerdictRecord | None,
    blamed: IncidentReport | None,
    found: Mapping[str, Any] | None,
    events: Sequence[Event],
    broken: Sequence[GpuFault],
) -> Story | None:
    """Told now of a run that has left none: it is under way, was killed, or is of an older version.

    ``blamed`` is the incident that explains how it stands.
    """
    first = None if verdict is None else verdict.first_failure
    attempt = 0 if verdict is None else verdict.attempts - 1
    node = events[-1].node if events else ""
    story = tell(run, blamed, first, found, node=node, attempt=attempt)
    if story is None:
        return None
    ended = "" if verdict is None else verdict.reason
    return complete(story, events, broken, node=node, ended=ended, why=_why_not_retried(verdict))


def _without_step(run: Path) -> WithoutStep | None:
    from ncclops.status.reading import read_once  # not loaded for nothing

    try:
        return without_step(read_once(run))
    except OSError:
        return None


def _gpu_faults(verdict: VerdictRecord | None, events: Sequence[Event]) -> tuple[GpuFault, ...]:
    """Of all nodes where there is a verdict; before it those that this node's agent has seen."""
    if verdict is not None and verdict.gpu_faults:
        return tuple(verdict.gpu_faults)
    return tuple(event.fault for event in events if isinstance(event, GpuFaultEvent))


def _document(kind: DocumentKind[Record], path: Path, notes: list[str]) -> Record | None:
    try:
        return kind.read(path)
    except UsageError as error:
        notes.append(f"left out: {error}")
        return None


def _run_id(record: VerdictRecord | RunRecord | None) -> str | None:
    return None if record is None else record.run_id


def _incident(run: Path, notes: list[str]) -> IncidentReport | None:
    incidents = RunPaths(run).incidents
    if not (known := numbered(incidents)):
        return None
    directory = incidents / str(known[-1])
    is_cut = not (directory / INCIDENT).exists() and incident_record.read(directory) is None
    if is_cut and RunPaths(run).verdict.exists():
        notes.append(f"incident {known[-1]} was cut short: {NOT_WRITTEN}")
        return None
    try:
        return report_incident(run, None)
    except (NcclopsError, OSError) as error:
        notes.append(f"the latest incident cannot be read: {error}")
        return None


def _classified(run: Path, notes: list[str]) -> dict[str, Any] | None:
    """The classifier's verdict on all logs of the run, where it has one."""
    from ncclops.classify import classify_paths

    try:
        report = classify_paths([run])
    except NcclopsError as error:
        notes.append(f"the logs cannot be classified: {error}")
        return None
    if not report.verdict.names_failure:
        return None
    lines = [line.as_json() for line in report.evidence[:_EVIDENCE_LINES]]
    return report.verdict.as_json() | {"evidence": lines}


def _why_not_retried(verdict: VerdictRecord | None) -> str:
    found = None if verdict is None else verdict.classification
    return "" if found is None or found.decision is None else found.decision.reason


def without_group_s(events: Sequence[Event], now: float) -> float | None:
    """For how many seconds workers have run of which none has come to a process group or a step.

    ``events`` are in order of time. None: one of them has, or they have just been started.
    """
    since: float | None = None
    for event in events:
        if isinstance(event, WorkerStartedEvent):
            since = event.ts
        elif isinstance(event, _BEGUN):
            since = None
    return None if since is None or now - since < _STARTS_WITHIN_S else now - since


def _sentence(
    state: State,
    verdict: VerdictRecord | None,
    recorded: Recorded | None,
    waited_s: float | None,
) -> str:
    if state == "running" and waited_s is not None:
        waited = format_rounded(timedelta(seconds=waited_s))
        return f"the run is under way, and no rank has a process group or a step after {waited}"
    if state == "running":
        return "the run is under way, and nothing is wrong that is on record"
    if verdict is not None:
        return verdict.reason or "no reason is on record"
    if recorded is not None:
        return recorded.sentence
    return "the run has no verdict, and no agent on this machine: it was killed, or is elsewhere"


def _receipt(verdict: VerdictRecord | None) -> str | None:
    return None if verdict is None or verdict.receipt is None else verdict.receipt.verdict


def _next_command(
    run: Path,
    state: State,
    outcome: str | None,
    story: Story | None,
    lost: Sequence[int],
    waited_s: float | None,
) -> str:
    """The command that shows more of what matters here."""
    name = quote(str(run))
    incidents = numbered(RunPaths(run).incidents)
    if state == "running":
        # Where ranks are that have not come so far, no record tells.
        return f"ncclops {'status' if story is None and waited_s is None else 'stacks'} {name}"
    if story is not None:
        return story.next_command
    if lost and incidents:  # it went on without them: why they were lost is told there
        return f"ncclops incident {name} {incidents[-1]}"
    if outcome == "no-receipt":
        return f"ncclops receipt check {name}"
    return f"ncclops {'bundle' if outcome == 'failed' or state == 'lost' else 'report'} {name}"
