"""The run directory as the report reads it. What is missing or broken is left out, not fatal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ncclops.errors import UsageError
from ncclops.record import event_log, incident_record, receipt_records, runs
from ncclops.record.document_kind import DocumentKind
from ncclops.record.events import Event
from ncclops.record.incident_record import IncidentRecord
from ncclops.record.lines import read_records
from ncclops.record.paths import RunPaths, numbered
from ncclops.record.preflight_record import PREFLIGHT, PreflightRecord
from ncclops.record.receipt_records import StepRecord
from ncclops.record.run_record import RUN, RunRecord
from ncclops.record.story_record import Story
from ncclops.record.verdict_record import VERDICT, VerdictRecord
from ncclops.redaction.of_run import redactor_of
from ncclops.redaction.redactor import Redactor
from ncclops.report import incidents

Record = dict[str, Any]
AnyEvent = TypeVar("AnyEvent", bound=Event)
AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)


@dataclass(frozen=True)
class StepTime:
    """One step of one rank, ``at`` its end in seconds since the epoch.

    ``seconds`` is the time the rank was busy where the script reports it: collectives make
    all ranks wait for the slowest, and then all steps take equally long.
    ``counts`` is False for the first of an iteration (it contains the compile) and for one with
    a declared phase in it: they say nothing about how fast the rank is.
    """

    step: int
    seconds: float
    at: float
    counts: bool


@dataclass(frozen=True)
class Records:
    """What is on record of one run; ``steps`` by initial rank, in the order they were done.

    ``story`` is what ``ncclops diagnose`` tells; ``incident_reports`` are the newest, as
    ``ncclops incident --json`` has them.
    """

    path: Path
    run: RunRecord
    verdict: VerdictRecord | None
    events: tuple[Event, ...]
    incidents: tuple[IncidentRecord, ...]
    incident_reports: tuple[Record, ...] = ()
    story: Story | None = None
    preflight: PreflightRecord | None = None
    steps: dict[int, list[StepTime]] = field(default_factory=dict)

    def of(self, *types: type[AnyEvent]) -> list[AnyEvent]:
        """The events of one of ``types``."""
        return [event for event in self.events if isinstance(event, types)]


def read(path: Path) -> Records:
    """Read the run in ``path``, without secrets: a report is passed around.

    Raises ``UsageError`` if there is no run.
    """
    paths = RunPaths(path)
    if not paths.holds_run():
        raise runs.no_run(path)
    redactor = redactor_of(paths)
    events = [redactor.record(event) for event in event_log.read(paths.events)]
    return Records(
        path=path,
        run=_document(RUN, paths.run, redactor) or RunRecord(),
        verdict=_document(VERDICT, paths.verdict, redactor),
        events=tuple(sorted(events, key=lambda event: event.ts)),
        incidents=tuple(redactor.record(each) for each in _incidents(paths)),
        incident_reports=tuple(redactor.document(each) for each in incidents.newest_reports(path)),
        story=_story(path, redactor),
        preflight=_document(PREFLIGHT, paths.preflight, redactor),
        steps=dict(_steps(paths)),
    )


def _story(path: Path, redactor: Redactor) -> Story | None:
    from ncclops.diagnose import diagnose

    story = diagnose(path).story
    return None if story is None else redactor.record(story)


def _document(kind: DocumentKind[AnyStruct], path: Path, redactor: Redactor) -> AnyStruct | None:
    try:
        record = kind.read(path)
    except UsageError:
        return None
    return None if record is None else redactor.record(record)


def _incidents(paths: RunPaths) -> Iterator[IncidentRecord]:
    records = (incident_record.read(paths.incident(n)) for n in numbered(paths.incidents))
    return (record for record in records if record is not None)


def _steps(paths: RunPaths) -> Iterator[tuple[int, list[StepTime]]]:
    for rank in paths.rank_numbers():
        yield rank, list(_steps_of(paths.rank(rank).receipt))


def _steps_of(path: Path) -> Iterator[StepTime]:
    for record in read_records(path, receipt_records.decode):
        if not isinstance(record, StepRecord):
            continue
        seconds = record.seconds if record.busy_s is None else record.busy_s
        if seconds is not None:
            yield StepTime(
                step=record.step,
                seconds=seconds,
                at=record.ts,
                counts=not record.first and not record.phase_s,
            )
