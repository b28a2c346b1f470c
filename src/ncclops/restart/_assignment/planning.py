"""Running a rank assignment, in one of two ways.

The shipped assignments are functions of the whole world: the rank that completes the barrier runs
them once, for all (``PlannedAssigner``, ``plan``). Any other ``RankAssignment`` is called on every
rank, with what the ranks have agreed on (``RankByRankAssigner``, ``assign``).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ncclops.restart._assignment.base import (
    PlannedAssignment,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
)
from ncclops.restart._assignment.world import (
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

    Meant to be called once, when the assignment is given: raises ``ValueError`` for a composition
    that cannot work (a ``Tree`` in it, a group filter that nothing follows to take ranks out,
    filters that undo each other), and warns where one loses what it decided or ends with the first
    rank that is lost. Of a user's own members only what they inherit is known.
    """
    members = _members(assignment)
    planned = all(map(_has_plan, members))
    _check(members)
    _warn_about_late_renumbering(members, "it is run after" if planned else "its choice is lost")
    if planned:
        _warn_where_losses_stay(assignment, members)
    first_renumbering = next((i for i, m in enumerate(members) if _is(m, "renumbers")), None)
    late = () if first_renumbering is None else members[first_renumbering + 1 :]
    return planned and not any(step.key_functions for step in late)


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
    steps = _planned_steps(assignment)
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
    ``exception.TimeoutError`` when other ranks did not take part in time, ``TypeError`` where the
    assignment returns no context, ``RestartError`` where it gives more active ranks than are left,
    and whatever it raises.
    """
    left = ctx.state.world_size - len(ctx.terminated_ranks)
    after = assignment(ctx)
    if not isinstance(after, RankAssignmentCtx):
        raise TypeError(
            f"{assignment!r} returned {after!r}: it has to return the RankAssignmentCtx that it is "
            "called with, changed"
        )
    state = after.state
    if state.active_world_size is None:
        Placement(state.rank, state.world_size, state.world_size).apply_to(state)
    if (state.active_world_size or 0) > left:
        raise RestartError(
            f"{assignment!r} gives {state.active_world_size} active ranks, and {left} are left: "
            "it has to take terminated ranks out, as ShiftRanks() or FillGaps() does"
        )
    return after


def _members(assignment: object) -> list[Any]:
    """The members of ``assignment`` and of each ``Compose`` in it, in the order they run."""
    if isinstance(assignment, Compose) and _inherits_call(assignment, Compose):
        return [member for part in reversed(assignment.instances) for member in _members(part)]
    return [assignment]


def _has_plan(member: object) -> bool:
    return isinstance(member, PlannedAssignment) and _inherits_call(member, PlannedAssignment)


def _is(member: object, quality: str) -> bool:
    """Whether a member says so of itself; see ``PlannedAssignment``."""
    return bool(getattr(member, quality, False))


def _inherits_call(instance: object, base: type) -> bool:
    """Whether calling ``instance`` runs the code of ``base``; else plan() may not do the same."""
    call_of = operator.attrgetter("__call__")
    return call_of(type(instance)) is call_of(base)


def _planned_steps(assignment: RankAssignment) -> list[PlannedAssignment]:
    """In the order in which they are planned: filters come last."""
    members = _members(assignment)
    if not all(map(_has_plan, members)):
        raise TypeError(f"{assignment!r} has no global plan: it has to be called rank by rank")
    return sorted(members, key=lambda member: isinstance(member, RankFilter))


def _check(members: Sequence[object]) -> None:
    if len(members) > 1 and any(_is(member, "stands_alone") for member in members):
        raise ValueError("Tree cannot be composed: express the rest as its layers and filter")
    # A user's own filter may well decide anew what ActivateAllRanks has decided before it.
    shipped = [member for member in members if isinstance(member, PlannedAssignment)]
    filters = [member for member in shipped if isinstance(member, RankFilter)]
    if len(filters) > 1 and any(_is(member, "sole_filter") for member in filters):
        names = ", ".join(type(member).__name__ for member in reversed(filters))
        raise ValueError(
            f"ActivateAllRanks undoes what another filter decides, or is undone by it: {names}; "
            "leave it out"
        )
    for index, member in enumerate(members):
        if _is(member, "marks_ranks") and not any(map(_may_take_out, members[index + 1 :])):
            raise ValueError(
                f"{type(member).__name__} only marks ranks for termination: list ShiftRanks() or "
                "FillGaps() before it in the Compose (the last listed runs first)"
            )


def _may_take_out(member: object) -> bool:
    """Whether ``member`` takes terminated ranks out; of a user's own that is not known."""
    own = not isinstance(member, PlannedAssignment | RankFilter)
    return own or _is(member, "renumbers")


def _warn_about_late_renumbering(members: Sequence[object], consequence: str) -> None:
    filters = [index for index, member in enumerate(members) if isinstance(member, RankFilter)]
    if filters and any(_is(member, "renumbers") for member in members[filters[0] :]):
        warnings.warn(
            f"{type(members[filters[0]]).__name__} chooses active ranks before ranks are renumbered"
            f"; {consequence}: list filters first in the Compose (the last listed runs first)",
            UserWarning,
            stacklevel=3,
        )


def _warn_where_losses_stay(assignment: RankAssignment, members: Sequence[object]) -> None:
    if not any(_is(member, "renumbers") for member in members):
        warnings.warn(
            f"{assignment!r} takes no terminated ranks out, so that the job ends with the first "
            "rank that is lost: compose it with ShiftRanks() or FillGaps(), listed last",
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
