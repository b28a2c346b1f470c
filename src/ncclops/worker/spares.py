"""Ranks in reserve: they take part, do not train, and move up when others are lost."""

from __future__ import annotations

from ncclops import restart
from ncclops.receipts import recorder
from ncclops.record import worker_record
from ncclops.record.events import EnteredEvent
from ncclops.restart.initialize import Initialize
from ncclops.restart.rank_assignment import (
    ActivateAllRanks,
    MaxActiveWorldSize,
    RankAssignment,
    ShiftRanks,
)
from ncclops.restart.state import FrozenState, Mode


class Entered(Initialize):
    """Reports that the restart core watches this spare rank, as it does those that train.

    As long as it only waits, it is not watched for hangs.
    """

    def __init__(self) -> None:
        self._reported = False

    def __call__(self, state: FrozenState) -> FrozenState:
        if state.mode is Mode.INACTIVE:
            recorder.current().leave()
            if not self._reported:
                self._reported = True
                worker_record.report(EnteredEvent())
        return state


def assignment(active: str | None) -> RankAssignment:
    """All ranks take part, or the lowest ``active``; survivors move up into the gaps."""
    who = ActivateAllRanks() if active is None else MaxActiveWorldSize(int(active))
    composed: RankAssignment = restart.Compose(who, ShiftRanks())
    return composed
