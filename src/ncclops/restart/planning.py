"""From who is left to who is what: the two ways a rank assignment is run.

The shipped assignments are functions of the whole world; the rank that completes the barrier
runs them once, for all (``PlannedAssignments``). Any other ``RankAssignment`` is called on every
rank, with what the ranks agreed on (``RankByRank``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch.distributed import Store

from ncclops.restart import rank_assignment as assignments
from ncclops.restart.agreement import INITIAL, Agreement, Plan, Planner
from ncclops.restart.exception import RestartError
from ncclops.restart.rank_assignment import (
    Placement,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    World,
)
from ncclops.restart.state import State
from ncclops.restart.store import PrefixStore

log = logging.getLogger("ncclops.restart")

_DISCARDED = "discarded"
_FAILED = "failed: "


class Assigner(Protocol):
    """Applies the outcome of a barrier to this rank's state."""

    planner: Planner | None

    def keys(self, state: State, iteration: int) -> tuple[str, ...]:
        """What this rank has to bring to the barrier at the end of ``iteration``."""

    def assign(self, state: State, agreement: Agreement, placement: str | None) -> None:
        """Give ``state`` its numbers for the next iteration.

        Raises ``RankDiscarded`` when there is no place for this rank, and what the assignment
        raises.
        """


def choose_assigner(assignment: RankAssignment, store: Store) -> Assigner:
    """The way to run ``assignment``; ``store`` is for assignments that are called on each rank."""
    if assignments.supports_global_plan(assignment):
        return PlannedAssigner(assignment)
    return RankByRankAssigner(assignment, store)


class PlannedAssigner:
    """Decided by one rank for all; the others receive their ``Placement``."""

    def __init__(self, assignment: RankAssignment) -> None:
        self._assignment = assignment
        self._keys_change = assignments.keys_change(assignment)
        self.planner: Planner | None = self._plan

    def keys(self, state: State, iteration: int) -> tuple[str, ...]:
        """See ``Assigner.keys``."""
        if iteration != INITIAL and not self._keys_change:
            return ()
        return tuple(assignments.local_keys(self._assignment, state))

    def _plan(
        self, before: World | None, agreement: Agreement, arrived: Mapping[int, Sequence[str]]
    ) -> Plan:
        everybody = arrived.keys() | agreement.gone
        world = World(tuple(sorted(everybody))) if before is None else before
        world = world.losing(agreement.gone)
        if before is None or self._keys_change:
            world = world.with_keys(arrived)
        try:
            after = assignments.plan(self._assignment, world)
            places = {rank: p.to_text() for rank, p in assignments.placements(after).items()}
        except Exception as error:  # noqa: BLE001 - users' conditions; all ranks have to hear of it
            after, places = (
                world,
                dict.fromkeys(arrived, f"{_FAILED}{type(error).__name__}: {error}"),
            )
        # also those who have gone: they may be alive, and waiting to hear it
        told = {rank: places.get(rank, _DISCARDED) for rank in everybody}
        return Plan(after.to_json(), told)

    def assign(self, state: State, agreement: Agreement, placement: str | None) -> None:  # noqa: ARG002
        """See ``Assigner.assign``."""
        if placement is None or placement == _DISCARDED:
            raise RankDiscarded(
                f"the rank assignment of iteration {state.iteration} has no place for initial "
                f"rank {state.initial_rank}"
            )
        if placement.startswith(_FAILED):
            raise RestartError(f"rank assignment {placement}")
        Placement.from_text(placement).apply_to(state)


class RankByRankAssigner:
    """Called on every living rank, as the public API has it."""

    planner: Planner | None = None

    def __init__(self, assignment: RankAssignment, store: Store) -> None:
        self._assignment = assignment
        self._store = store

    def keys(self, state: State, iteration: int) -> tuple[str, ...]:  # noqa: ARG002
        """See ``Assigner.keys``."""
        return ()

    def assign(self, state: State, agreement: Agreement, placement: str | None) -> None:  # noqa: ARG002
        """See ``Assigner.assign``."""
        store = PrefixStore(f"{agreement.iteration}/assignment", self._store)
        context = RankAssignmentCtx(state, store, set(agreement.terminated))
        state.copy_from(assignments.assign(self._assignment, context).state)
