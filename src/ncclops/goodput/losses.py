"""A run against the same run without a fault: what each cause has cost. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ncclops.goodput.spans import TRAINING, Span
from ncclops.record.events import Event, RestartEvent, StepEvent

UNFINISHED = "a step that was cut, and until the fault was noticed"
REDONE = "steps done again"
SEAT = "waiting for lost ranks to come back"
NEW_PROCESSES = "ending and starting processes"
PAUSE = "pause before a retry, and waiting for nodes"
_STARTING = ("start-up", "compile", "unmeasured")
_PAUSES = ("restart", "cool-down")


@dataclass(frozen=True)
class Losses:
    """Seconds of a run: ``useful`` in steps that lasted, ``lost`` to faults by cause, ``total``.

    What is neither is the start that the first steps followed, and the end: a run without a fault
    has them as well.
    """

    useful: float
    lost: Mapping[str, float]
    total: float

    @property
    def ideal(self) -> float:
        """Seconds that the run would have taken without a fault, as far as is known."""
        return self.total - sum(self.lost.values())


def losses(spans: Sequence[Span], events: Iterable[Event]) -> Losses | None:
    """What faults have cost the run of ``spans``; None where no step was seen.

    ``events`` are those that the spans are made of: they tell the phases of restarts, and when the
    last step before a fault had ended.
    """
    events = list(events)
    trained = next((n for n, each in enumerate(spans) if each.kind in TRAINING), None)
    if trained is None:
        return None
    begins = trained
    while begins and spans[begins - 1].kind in _STARTING:
        begins -= 1
    ends = sorted(event.ts for event in events if isinstance(event, StepEvent))
    restarts = restarts_within(spans, events)
    useful, lost = 0.0, dict[str, float]()

    def lose(cause: str, seconds: float) -> None:
        if seconds > 0:
            lost[cause] = lost.get(cause, 0.0) + seconds

    for number, span in enumerate(spans):
        followed = number + 1 < len(spans) and spans[number + 1].kind in _PAUSES
        if span.kind in TRAINING:
            last = _last_step(ends, span) if followed else span.end
            lose(UNFINISHED, span.end - last)
            if span.kind == "redone":
                lose(REDONE, last - span.start)
            else:
                useful += last - span.start
        elif span.kind == "unmeasured" and number and spans[number - 1].kind in TRAINING:
            lose(UNFINISHED, span.seconds)
        elif span.kind == "restart":
            phases = _phases(restarts.get(number, ()), span)
            for cause, seconds in phases.items():
                lose(cause, seconds)
            lose(NEW_PROCESSES, span.seconds - sum(phases.values()))
        elif span.kind == "cool-down":
            lose(PAUSE, span.seconds)
        elif span.kind in _STARTING and not begins <= number < trained:
            lose(f"{span.kind} again" if number > trained else f"{span.kind} in vain", span.seconds)
    return Losses(useful, lost, sum(span.seconds for span in spans))


def restarts_within(
    spans: Sequence[Span], events: Iterable[Event]
) -> Mapping[int, Sequence[RestartEvent]]:
    """The restarts in place that ended within the restarts among ``spans``, by their places."""
    starts = [span.start for span in spans]
    found: dict[int, list[RestartEvent]] = {}
    for event in events:
        if not isinstance(event, RestartEvent):
            continue
        # One that ends where another span begins belongs to the span before.
        place = bisect_left(starts, event.ts) - 1
        if place >= 0 and spans[place].kind == "restart" and event.ts <= spans[place].end:
            found.setdefault(place, []).append(event)
    return found


def _last_step(ends: Sequence[float], span: Span) -> float:
    """When the last step of ``span`` ended, by the ``ends`` that are recorded; else its end."""
    before = bisect_right(ends, span.end)
    return ends[before - 1] if before and ends[before - 1] >= span.start else span.end


def _phases(restarts: Iterable[RestartEvent], span: Span) -> dict[str, float]:
    """Seconds of each phase of ``restarts``, which ended within ``span``.

    No more than the span has: where two restarts follow each other, it may be shorter.
    """
    found: dict[str, float] = {}
    for event in restarts:
        for name, ms in event.phases_ms.items():
            cause = SEAT if name == "grow" else f"restart in place: {name}"
            found[cause] = found.get(cause, 0.0) + ms / 1000
    excess = sum(found.values()) / span.seconds
    return {cause: each / max(1.0, excess) for cause, each in found.items()}
