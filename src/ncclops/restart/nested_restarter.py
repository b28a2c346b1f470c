"""Lines in the log by which an outer restarter sees what this inner one is doing.

A launcher that also restarts must not act while ranks restart in process. One rank,
``special_rank``, logs at level INFO::

    [NestedRestarter] name=[InProcess] state=handling stage=starting

The states are ``initialize`` (first iteration), ``handling`` with stage ``starting`` and
``completed`` (around a restart), ``finalized`` (all done) and ``aborted`` (a rank gave up).
"""

from __future__ import annotations

import logging

from ncclops.restart.abort import Abort
from ncclops.restart.completion import Completion
from ncclops.restart.initialize import Initialize
from ncclops.restart.state import FrozenState
from ncclops.restart.terminate import Terminate

_log = logging.getLogger(__name__)


class NestedRestarterCallback:
    """Logs one state on the rank whose *current* number is ``special_rank``.

    The current number, because the process that had it at launch may be the one that was lost.
    """

    def __init__(
        self,
        restarter_state: str,
        restarter_stage: str | None = None,
        logger: logging.Logger = _log,
        special_rank: int = 0,
    ) -> None:
        self.restarter_state = restarter_state
        self.restarter_stage = restarter_stage
        self.logger = logger
        self.special_rank = special_rank

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log the line and return ``state``."""
        self._report(state, self.restarter_state, self.restarter_stage)
        return state

    def _report(self, state: FrozenState, restarter_state: str, stage: str | None) -> None:
        if state.rank == self.special_rank:
            line = f"[NestedRestarter] name=[InProcess] state={restarter_state}"
            self.logger.info("%s", line if stage is None else f"{line} stage={stage}")


class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """Logs ``initialize`` at first and ``handling``/``completed`` in every later iteration.

    List it first in a ``Compose`` of ``Initialize``: the restart is over when all have run.
    """

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("handling", "completed", special_rank=special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log the line and return ``state``."""
        if state.iteration > 0:
            return super().__call__(state)
        self._report(state, "initialize", None)
        return state


class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """Logs ``handling``/``starting`` when a fault has been seen."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("handling", "starting", special_rank=special_rank)


class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """Logs ``finalized`` when all ranks have completed."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("finalized", special_rank=special_rank)


class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """Logs ``aborted`` when the rank leaves with an exception."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("aborted", special_rank=special_rank)
