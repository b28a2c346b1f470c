"""Running a rank assignment, in one of two ways.

The shipped assignments are functions of the whole world: the rank that completes the barrier runs
them once, for all (``PlannedAssigner``, ``plan``). Any other ``RankAssignment`` is called on every
rank, with what the ranks have agreed on (``RankByRankAssigner``, ``assign``).
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ncclops.restart._assignment import (
    PlannedAssignment,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
)
from ncclops.restart._world import (
    AssignmentFailed,
    NoPlace,
    Place,
    Placement,
    World,
    activate_all,
    placements,
)
from ncclops.restart.agreement import INITIAL, Agreement, Planner, RestartPlan
from ncclops.restart.compose import Compose
from ncclops.restart.exception import RestartError
from ncclops.restart.state import State

if TYPE_CHECKING:
    from torch.distributed import Store


def supports_global_plan(assignment: RankAssignment) -> bool:
    """Whether ``plan`` can decide for ``assignment``; else it has to be called rank by rank.

    So it is for the shipped assignments and any ``Compose`` of them, unless a group filter's
    key function would be evaluated on numbers that another member changes before it.

    Meant to be called once, when the assignment is given: raises ``ValueError`` for a ``Tree``
    in a composition and for a group filter that nothing follows to take ranks out, and warns
    where a composition renumbers ranks after it chose the active ones.
    """
    steps = _steps(assignment)
    if steps is None:
        return False
    _check_steps(steps)
    _warn_about_late_renumbering(steps)
    first_renumbering = next((i for i, step in enumerate(steps) if step.renumbers), len(steps))
    return not any(step.key_functions for step in steps[first_renumbering + 1 :])


def local_keys(assignment: RankAssignment, state: State) -> list[str]:
    """The keys that this rank has to contribute to ``World.keys``; empty when none are needed.

    ``state`` is the one of the ending iteration. Exceptions are those of the user's functions.
    """
    return [key(state) for step in _planned_steps(assignment) for key in step.key_functions]


def keys_change(assignment: RankAssignment) -> bool:
    """Whether keys must be gathered for every ``plan``; if not, those of the first world last."""
    return any(step.key_functions and not step.keys_last for step in _planned_steps(assignment))


def plan(assignment: RankAssignment, world: World) -> World:
    """The next world: no rank in it is dead, and ``active`` is decided.

    Raises ``TypeError`` unless ``supports_global_plan``, and ``RestartError`` when a living rank
    has reported no keys or when ``assignment`` does not take dead ranks out.
    """
    steps = sorted(_planned_steps(assignment), key=lambda step: isinstance(step, RankFilter))
    columns = sum(len(step.key_functions) for step in steps)
    _check_keys(world, columns)
    column = 0
    for step in steps:
        world = step.plan(world, column)
        column += len(step.key_functions)
    if world.dead:
        raise RestartError(
            f"{assignment!r} leaves terminated ranks {sorted(world.dead)[:8]} in place: "
            "add ShiftRanks() or FillGaps()"
        )
    # Without a filter all ranks are active, in the guides' own examples too.
    return world if world.active is not None else activate_all(world)


def assign(assignment: RankAssignment, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
    """Run ``assignment`` rank by rank; where it chose no active ranks, all of them are.

    Called on every living rank. Raises ``RankDiscarded`` where this rank has to leave,
    ``exception.TimeoutError`` when other ranks did not take part in time, and whatever the
    assignment raises.
    """
    ctx = assignment(ctx)
    state = ctx.state
    if state.active_world_size is None:
        Placement(state.rank, state.world_size, state.world_size).apply_to(state)
    return ctx


def _steps(assignment: object) -> list[PlannedAssignment] | None:
    """The members of ``assignment`` in the order they run, or ``None`` if any is not planned."""
    if isinstance(assignment, Compose) and _inherits_call(assignment, Compose):
        parts = [_steps(part) for part in reversed(assignment.instances)]
        return None if None in parts else [step for part in parts for step in part or ()]
    if isinstance(assignment, PlannedAssignment) and _inherits_call(assignment, PlannedAssignment):
        return [assignment]
    return None


def _inherits_call(instance: object, base: type) -> bool:
    """Whether calling ``instance`` runs the code of ``base``; else plan() may not do the same."""
    call_of = operator.attrgetter("__call__")
    return call_of(type(instance)) is call_of(base)


def _planned_steps(assignment: RankAssignment) -> list[PlannedAssignment]:
    steps = _steps(assignment)
    if steps is None:
        raise TypeError(f"{assignment!r} has no global plan: it has to be called rank by rank")
    return steps


def _check_steps(steps: Sequence[PlannedAssignment]) -> None:
    if len(steps) > 1 and any(step.stands_alone for step in steps):
        raise ValueError("Tree cannot be composed: express the rest as its layers and filter")
    filters = [step for step in steps if isinstance(step, RankFilter)]
    if len(filters) > 1 and any(step.sole_filter for step in filters):
        names = ", ".join(type(step).__name__ for step in reversed(filters))
        raise ValueError(
            f"ActivateAllRanks undoes what another filter decides, or is undone by it: {names}; "
            "leave it out"
        )
    for index, step in enumerate(steps):
        followers = steps[index + 1 :]
        if step.marks_ranks and not any(follower.renumbers for follower in followers):
            raise ValueError(
                f"{type(step).__name__} only marks ranks for termination: list ShiftRanks() or "
                "FillGaps() before it in the Compose (the last listed runs first)"
            )


def _warn_about_late_renumbering(steps: Sequence[PlannedAssignment]) -> None:
    filters = [index for index, step in enumerate(steps) if isinstance(step, RankFilter)]
    if filters and any(step.renumbers for step in steps[filters[0] :]):
        warnings.warn(
            f"{type(steps[filters[0]]).__name__} chooses active ranks before ranks are renumbered;"
            " it is run after: list filters first in the Compose (the last listed runs first)",
            UserWarning,
            stacklevel=3,
        )


def _check_keys(world: World, columns: int) -> None:
    if not columns:
        return
    keys = world.keys or ((),) * len(world)
    silent = [world.initial_ranks[rank] for rank in world.alive if len(keys[rank]) != columns]
    if silent:
        raise RestartError(
            f"rank assignment needs {columns} keys of every living rank, and has none or others "
            f"of initial ranks {silent[:8]}"
        )


log = logging.getLogger("ncclops.restart")


class Assigner(Protocol):
    """Applies the outcome of a barrier to this rank's state."""

    planner: Planner | None

    def keys(self, state: State, iteration: int) -> tuple[str, ...]:
        """What this rank has to bring to the barrier at the end of ``iteration``."""

    def assign(self, state: State, agreement: Agreement, placement: Place | None) -> None:
        """Give ``state`` its numbers for the next iteration.

        Raises ``RankDiscarded`` when there is no place for this rank, and what the assignment
        raises.
        """


def choose_assigner(assignment: RankAssignment, store: Callable[[], Store]) -> Assigner:
    """The way to run ``assignment``; ``store`` is for assignments that are called on each rank."""
    if supports_global_plan(assignment):
        return PlannedAssigner(assignment)
    return RankByRankAssigner(assignment, store)


class PlannedAssigner:
    """Decided by one rank for all; the others receive their ``Placement``."""

    def __init__(self, assignment: RankAssignment) -> None:
        self._assignment = assignment
        self._keys_change = keys_change(assignment)
        self.planner: Planner | None = self._plan

    def keys(self, state: State, iteration: int) -> tuple[str, ...]:
        """See ``Assigner.keys``."""
        if iteration != INITIAL and not self._keys_change:
            return ()
        return tuple(local_keys(self._assignment, state))

    def _plan(
        self, before: World | None, agreement: Agreement, arrived: Mapping[int, Sequence[str]]
    ) -> RestartPlan:
        members = arrived.keys() | agreement.gone
        world = World(tuple(sorted(members))) if before is None else before
        world = world.losing(agreement.gone)
        if before is None or self._keys_change:
            world = world.with_keys(arrived)
        try:
            after = plan(self._assignment, world)
            places: dict[int, Place] = dict(placements(after))
        except Exception as error:  # noqa: BLE001 - users' conditions; every rank has to raise it
            failed = AssignmentFailed(f"{type(error).__name__}: {error}")
            after, places = world, dict.fromkeys(arrived, failed)
        # also for those that have gone: they may be alive, and waiting for it
        result = {rank: places.get(rank, NoPlace()) for rank in members}
        return RestartPlan(after.to_json(), result)

    def assign(self, state: State, agreement: Agreement, placement: Place | None) -> None:  # noqa: ARG002
        """See ``Assigner.assign``."""
        match NoPlace() if placement is None else placement:
            case Placement() as place:
                place.apply_to(state)
            case AssignmentFailed(error):
                raise RestartError(f"rank assignment failed: {error}")
            case NoPlace():
                raise RankDiscarded(
                    f"the rank assignment of iteration {state.iteration} has no place for initial "
                    f"rank {state.initial_rank}"
                )


class RankByRankAssigner:
    """Called on every living rank, as the public API has it."""

    planner: Planner | None = None

    def __init__(self, assignment: RankAssignment, store: Callable[[], Store]) -> None:
        self._assignment = assignment
        self._store = store

    def keys(self, state: State, iteration: int) -> tuple[str, ...]:  # noqa: ARG002
        """See ``Assigner.keys``."""
        return ()

    def assign(self, state: State, agreement: Agreement, placement: Place | None) -> None:  # noqa: ARG002
        """See ``Assigner.assign``."""
        from ncclops.restart.store import (
            PrefixStore,  # needs torch, the rest of the module does not
        )

        store = PrefixStore(f"{agreement.iteration}/assignment", self._store())
        context = RankAssignmentCtx(state, store, set(agreement.terminated))
        state.copy_from(assign(self._assignment, context).state)
