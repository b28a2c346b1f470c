"""How long ago a run under way made its last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from ncclops.durations import format_duration
from ncclops.record.events import Event, RestartEvent, RetryEvent, StepEvent, WorkerStartedEvent

# A step is recorded every ten seconds.
_QUIET_S = 20.0
# Some steps take longer than others: an evaluation, a checkpoint.
_QUIET_STEPS = 10


@dataclass(frozen=True)
class Pace:
    """The last step on record; None: there is none."""

    step: int | None = None
    age_s: float = 0.0
    is_overdue: bool = False
    """Another should have been recorded by now. A hang shows so long before it counts as one."""

    @classmethod
    def of(cls, events: Sequence[Event], now: float) -> Pace:
        """By ``events``, in their order, at ``now`` (seconds since the epoch)."""
        last, took, is_starting = None, None, False
        for event in events:
            match event:
                case StepEvent():
                    last, is_starting = event, False
                    took = took if event.step_s is None else event.step_s
                case WorkerStartedEvent() | RestartEvent() | RetryEvent():
                    is_starting = True  # what it takes until the next step is no step's time
                case _:
                    pass
        if last is None:
            return cls()
        age = max(now - last.ts, 0.0)
        is_known = took is not None and not is_starting
        return cls(last.step, age, is_known and age > _QUIET_S + _QUIET_STEPS * (took or 0.0))

    def __str__(self) -> str:
        if self.step is None:
            return "no step is on record"
        return f"the last step on record, {self.step}, was {_spelled(self.age_s)} ago"


def _spelled(seconds: float) -> str:
    unit = next((unit for unit in (3600, 60) if seconds >= 2 * unit), 1)
    return format_duration(timedelta(seconds=round(seconds / unit) * unit))
