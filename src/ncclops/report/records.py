"""A run directory as the report sees it. Whatever is missing or broken is left out, not fatal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ncclops.errors import UsageError
from ncclops.redaction.redactor import Redactor
from ncclops.report import incidents

Record = dict[str, Any]


@dataclass(frozen=True)
class StepTime:
    """One step of one rank, ``at`` its end in seconds since the epoch.

    ``seconds`` is the time the rank was busy where the script tells that apart: collectives make
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

    ``told`` are the newest incidents, as ``ncclops incident`` tells them.
    """

    path: Path
    run: Record
    verdict: Record
    events: tuple[Record, ...]
    incidents: tuple[Record, ...]
    told: tuple[Record, ...] = ()
    steps: dict[int, list[StepTime]] = field(default_factory=dict)

    def named(self, *names: str) -> list[Record]:
        """The events with one of ``names``."""
        return [event for event in self.events if event["event"] in names]


def read(path: Path) -> Records:
    """Read the run in ``path``, without secrets: a report is passed around.

    Raises ``UsageError`` if there is no run.
    """
    if not (path / "events.jsonl").is_file():
        raise UsageError(f"{path} holds no run (no events.jsonl): name a run directory")
    redactor = Redactor()
    events = [
        redactor.document(event)
        for event in _lines(path / "events.jsonl")
        if isinstance(event.get("ts"), int | float) and isinstance(event.get("event"), str)
    ]
    return Records(
        path=path,
        run=_document(path / "run.json"),
        verdict=_document(path / "verdict.json"),
        events=tuple(sorted(events, key=lambda event: float(event["ts"]))),
        incidents=tuple(_incidents(path / "incidents")),
        told=tuple(redactor.document(each) for each in incidents.tell_newest(path)),
        steps=dict(_steps(path / "ranks")),
    )


def _incidents(folder: Path) -> Iterator[Record]:
    files = sorted(folder.glob("*/incident.json"), key=lambda file: file.parent.name.zfill(9))
    yield from filter(None, map(_document, files))


def _steps(folder: Path) -> Iterator[tuple[int, list[StepTime]]]:
    ranks = sorted(int(rank.name) for rank in folder.glob("*") if rank.name.isdecimal())
    for rank in ranks:
        yield rank, list(_steps_of(folder / str(rank) / "receipt.jsonl"))


def _steps_of(path: Path) -> Iterator[StepTime]:
    if not path.is_file():
        return
    for record in _lines(path):
        if record.get("kind") != "step":
            continue
        busy = record.get("busy_s")
        try:
            yield StepTime(
                step=int(record["step"]),
                seconds=float(record["seconds"] if busy is None else busy),
                at=float(record["ts"]),
                counts=not record.get("first") and not record.get("phase_s"),
            )
        except (KeyError, TypeError, ValueError):  # a step that was not timed
            continue


def _document(path: Path) -> Record:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return Redactor().document(document) if isinstance(document, dict) else {}


def _lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the last line of a process that was killed
            if isinstance(record, dict):
                yield record
