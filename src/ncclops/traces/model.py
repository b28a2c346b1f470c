"""The spans of a run's trace, as plain values, from its events. Pure.

The run is the root; below it are the spans of ``ncclops.goodput``, one after the other, and below
those the phases of restarts in place. What happened is an event of the span in which it did.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ncclops.goodput import Span, restarts_within, spans
from ncclops.record.events import (
    ClassifiedEvent,
    CompileStallEvent,
    ControlEvent,
    EscalationEvent,
    Event,
    FaultEvent,
    GpuFaultEvent,
    HangEndedEvent,
    HangEvent,
    InternalErrorEvent,
    PreflightEvent,
    ResourceGrowthEvent,
    RestartEvent,
    RetryEvent,
    RunStartedEvent,
    StartupStallEvent,
    StepEvent,
    StopAgreedEvent,
    StopForcedEvent,
    StopRequestedEvent,
    StragglerEvent,
    VerdictEvent,
    WorkerExitedEvent,
    XidEvent,
    name_of,
)

# Attributes as OpenTelemetry has them: no nested values.
Attribute = str | bool | int | float | Sequence[str] | Sequence[int]
# What a trace shows of a run. Not what comes once a step, a group or a worker that ends well: a run
# of thousands of ranks has more of these than a viewer can draw.
_SHOWN = (
    ClassifiedEvent,
    CompileStallEvent,
    ControlEvent,
    EscalationEvent,
    FaultEvent,
    GpuFaultEvent,
    HangEndedEvent,
    HangEvent,
    InternalErrorEvent,
    PreflightEvent,
    ResourceGrowthEvent,
    RestartEvent,
    RetryEvent,
    StartupStallEvent,
    StopAgreedEvent,
    StopForcedEvent,
    StopRequestedEvent,
    StragglerEvent,
    WorkerExitedEvent,
    XidEvent,
)
_FAILED = ("failed", "no-receipt")
_MOST_CHARS = 4000  # of one value: a traceback, not a log
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class TraceEvent:
    """Something that happened at ``at``, in seconds since the epoch."""

    name: str
    at: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceSpan:
    """``name`` from ``start`` to ``end``, in seconds since the epoch.

    ``parent`` is the place of the span above in the trace, None for the root; ``error`` says why
    the span has failed, None where it has not.
    """

    name: str
    start: float
    end: float
    parent: int | None
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    events: tuple[TraceEvent, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Trace:
    """One run; ``spans`` begin with the root, and each stands behind the span above it.

    ``trace_id`` and ``span_id`` follow from the run's id: a run that is sent twice is the same
    trace. ``host`` is where its agent ran, empty where no event says it.
    """

    run_id: str
    host: str
    spans: tuple[TraceSpan, ...]

    @property
    def trace_id(self) -> int:
        """128 bits, never 0."""
        return _number(f"trace {self.run_id}", 16)

    def span_id(self, place: int) -> int:
        """64 bits, never 0, of the span at ``place``."""
        return _number(f"span {self.run_id} {place}", 8)


def trace_of(events: Sequence[Event], about: Mapping[str, object]) -> Trace | None:
    """The trace of the run with these ``events``; None where they show no time.

    ``about`` is what else is known of the run, as attributes of the root by name.
    """
    parts = spans(events)
    if not parts:
        return None
    started = next((each for each in events if isinstance(each, RunStartedEvent)), None)
    verdict = next((each for each in events if isinstance(each, VerdictEvent)), None)
    run_id = started.run_id if started is not None else str(about.get("run_id", "unknown"))
    known = dict(about) | {"run_id": run_id}
    if started is not None:
        known["world_size"] = started.world_size
    if verdict is not None:
        known |= {"outcome": verdict.outcome, "exit_code": verdict.exit_code}
    failed = verdict is not None and verdict.outcome in _FAILED
    root = TraceSpan(
        "run",
        parts[0].start,
        parts[-1].end,
        None,
        attributes(known),
        error=_cut(verdict.reason) if failed and verdict is not None else None,
    )
    found = [root, *_of_goodput(parts, events)]
    for place, restarts in restarts_within(parts, events).items():
        for restart in restarts:
            found += _phases(parts[place], place + 1, restart)  # the root is the first
    return Trace(run_id, next((each.node for each in events if each.node), ""), tuple(found))


def attributes(values: Mapping[str, object]) -> dict[str, Attribute]:
    """``values`` as attributes named ``ncclops.…``, without those that are unknown or empty."""
    return {
        f"ncclops.{name}": _attribute(value)
        for name, value in values.items()
        if value is not None and value != "" and value != [] and value != {}
    }


def _of_goodput(parts: Sequence[Span], events: Iterable[Event]) -> Iterator[TraceSpan]:
    starts = [part.start for part in parts]
    shown: list[list[TraceEvent]] = [[] for _ in parts]
    steps: list[list[int]] = [[] for _ in parts]
    for event in sorted(events, key=lambda event: event.ts):
        place = max(0, bisect_right(starts, event.ts) - 1)
        if isinstance(event, StepEvent):
            steps[place].append(event.step)
        elif isinstance(event, _SHOWN) and not _ended_well(event):
            fields = msgspec.to_builtins(event)
            del fields["ts"], fields["event"]
            shown[place].append(TraceEvent(name_of(event), event.ts, attributes(fields)))
    for part, happened, done in zip(parts, shown, steps, strict=True):
        known = {"first_step": min(done), "last_step": max(done)} if done else {}
        yield TraceSpan(part.kind, part.start, part.end, 0, attributes(known), tuple(happened))


def _ended_well(event: Event) -> bool:
    return isinstance(event, WorkerExitedEvent) and event.exit_code == 0


def _phases(span: Span, place: int, restart: RestartEvent) -> Iterator[TraceSpan]:
    """The phases of ``restart``, which ended within ``span``, each as a span below ``place``."""
    at = restart.ts - sum(restart.phases_ms.values()) / 1000
    known = attributes({"iteration": restart.iteration})
    for name, ms in restart.phases_ms.items():
        end = at + ms / 1000
        # Where two restarts follow each other, the first part may lie before this span.
        if end > span.start:
            yield TraceSpan(name, max(at, span.start), end, place, known)
        at = end


def _attribute(value: object) -> Attribute:
    match value:
        case bool() | float():
            return value
        case int():
            return value if -_LARGEST <= value <= _LARGEST else str(value)
        case str():
            return _cut(value)
        case list() if all(isinstance(each, str) for each in value):
            return [_cut(each) for each in value]
        case list() if all(type(each) is int and abs(each) <= _LARGEST for each in value):
            return value
        case _:
            return _cut(json.dumps(value))


def _cut(text: str) -> str:
    # Half of a character pair cannot be sent.
    return text[:_MOST_CHARS].encode(errors="replace").decode()


def _number(text: str, size: int) -> int:
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=size).digest()
    return int.from_bytes(digest) or 1
