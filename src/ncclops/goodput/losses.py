"""A run against the same run without a fault: what each cause has cost. Pure."""

from __future__ import annotations

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
    useful, lost = 0.0, dict[str, float]()

    def lose(cause: str, seconds: float) -> None:
        if seconds > 0:
            lost[cause] = lost.get(cause, 0.0) + seconds

    for number, span in enumerate(spans):
        followed = number + 1 < len(spans) and spans[number + 1].kind in _PAUSES
        if span.kind in TRAINING:
            last = _last_step(events, span) if followed else span.end
            lose(UNFINISHED, span.end - last)
            if span.kind == "redone":
                lose(REDONE, last - span.start)
            else:
                useful += last - span.start
        elif span.kind == "unmeasured" and number and spans[number - 1].kind in TRAINING:
            lose(UNFINISHED, span.seconds)
        elif span.kind == "restart":
            phases = _phases(events, span)
            for cause, seconds in phases.items():
                lose(cause, seconds)
            lose(NEW_PROCESSES, span.seconds - sum(phases.values()))
        elif span.kind == "cool-down":
            lose(PAUSE, span.seconds)
        elif span.kind in _STARTING and not begins <= number < trained:
            lose(f"{span.kind} again" if number > trained else f"{span.kind} in vain", span.seconds)
    return Losses(useful, lost, sum(span.seconds for span in spans))


def _last_step(events: Sequence[Event], span: Span) -> float:
    """When the last step of ``span`` ended, as far as is recorded; its end, if nothing is."""
    ends = (event.ts for event in events if isinstance(event, StepEvent))
    return max((ts for ts in ends if span.start <= ts <= span.end), default=span.end)


def _phases(events: Sequence[Event], span: Span) -> dict[str, float]:
    """Seconds of each phase of the restarts in place that ended within ``span``.

    No more than the span has: where two restarts follow each other, it may be shorter.
    """
    found: dict[str, float] = {}
    for event in events:
        if isinstance(event, RestartEvent) and span.start < event.ts <= span.end:
            for name, ms in event.phases_ms.items():
                cause = SEAT if name == "grow" else f"restart in place: {name}"
                found[cause] = found.get(cause, 0.0) + ms / 1000
    excess = sum(found.values()) / span.seconds
    return {cause: each / max(1.0, excess) for cause, each in found.items()}
