"""A new process has taken the place of a lost rank in a script that wraps itself."""

from __future__ import annotations

from ncclops.record import worker_record
from ncclops.record.events import EnteredEvent
from ncclops.restart.initialize import Initialize
from ncclops.restart.state import FrozenState


class TakenPlace(Initialize):
    """Reports that the others have this process among them, as they start the function."""

    def __init__(self) -> None:
        self._reported = False

    def __call__(self, state: FrozenState) -> FrozenState:
        if not self._reported:
            self._reported = True
            worker_record.report(EnteredEvent())
        return state
