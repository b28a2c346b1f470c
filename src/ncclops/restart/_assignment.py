"""What a rank assignment is: the classes that the shipped ones and a user's own derive from."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING

from ncclops.restart._gather import gather_keys
from ncclops.restart._keys import KeyFunction
from ncclops.restart._world import Placement, World
from ncclops.restart.exception import RestartError
from ncclops.restart.state import State

if TYPE_CHECKING:
    from torch.distributed import Store

GATHER_TIMEOUT = timedelta(seconds=60)  # the default of FilterCountGroupedByKey in the public API


class RankDiscarded(RestartError):
    """The new assignment has no place for this rank: it has to leave."""


@dataclasses.dataclass
class RankAssignmentCtx:
    """What a ``RankAssignment`` is given, changes and returns.

    ``terminated_ranks`` are in the numbering of ``state.rank``; an assignment that renumbers
    ranks empties the set.
    """

    state: State
    store: Store
    terminated_ranks: set[int]
    # Gathers of one assignment need store keys of their own; the count is the same on all ranks.
    _gathers: int = dataclasses.field(default=0, init=False, repr=False, compare=False)


class RankAssignment(ABC):
    """Decides the ranks of the next iteration; called on every living rank with its own state."""

    @abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Change ``ctx`` and return it; raise ``RankDiscarded`` if this rank must leave."""


class RankFilter(RankAssignment):
    """A ``RankAssignment`` that selects the active ranks and leaves the numbering alone.

    It runs after the assignments that renumber, so it is listed before them in a ``Compose``.
    """


class PlannedAssignment(RankAssignment):
    """A ``RankAssignment`` defined by a pure function over the whole ``World``.

    Subclasses write ``plan`` and inherit the call; the wrapper then runs ``plan`` on one rank
    and publishes the outcome. A subclass that overrides ``__call__`` is run rank by rank.
    """

    renumbers = False  # whether plan() gives ranks new numbers, leaving no dead ones
    marks_ranks = False  # whether plan() declares living ranks dead
    keys_last = False  # whether a rank's keys are the same in every iteration
    stands_alone = False  # whether it refuses to be composed
    timeout = GATHER_TIMEOUT  # for gathering keys, when it runs rank by rank

    @property
    def key_functions(self) -> tuple[KeyFunction, ...]:
        """The grouping keys each rank has to report: the columns that ``plan`` finds in keys."""
        return ()

    @abstractmethod
    def plan(self, world: World, column: int = 0) -> World:
        """The next world; this assignment's own keys start at ``column`` of ``world.keys``."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """This rank's part of ``plan``, from its own state (and keys gathered over the store)."""
        if ctx.state.rank in ctx.terminated_ranks:  # marked by the assignment that ran before
            return _leave_or_pass(self, ctx)
        before = self._world_before(ctx)
        after = self.plan(before)
        self._remember(after)
        me = before.initial_ranks[ctx.state.rank]
        if me not in after.initial_ranks:
            raise _discarded(ctx)
        _settle(ctx, after, after.initial_ranks.index(me))
        return ctx

    def _world_before(self, ctx: RankAssignmentCtx) -> World:
        # One rank's state does not tell who the others were at launch; their current numbers
        # identify them as well within this one step.
        ranks = tuple(range(ctx.state.world_size))
        dead = frozenset(ctx.terminated_ranks)
        world = World(ranks, dead, active=ctx.state.active_world_size)
        if not self.key_functions:
            return world
        keys = tuple(key(ctx.state) for key in self.key_functions)
        prefix = f"rank_assignment/{ctx.state.iteration}/{ctx._gathers}"
        ctx._gathers += 1
        return world.with_keys(
            gather_keys(ctx.store, prefix, ctx.state.rank, world.alive, keys, self.timeout)
        )

    def _remember(self, world: World) -> None:
        """Called with the outcome when it runs rank by rank; nothing to keep, as a rule."""


def _leave_or_pass(step: PlannedAssignment, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
    if step.renumbers:
        raise _discarded(ctx)
    return ctx


def _discarded(ctx: RankAssignmentCtx) -> RankDiscarded:
    return RankDiscarded(f"rank {ctx.state.rank} has no place in the next iteration")


def _settle(ctx: RankAssignmentCtx, world: World, rank: int) -> None:
    """Write one rank's part of ``world`` into its context."""
    state = ctx.state
    ctx.terminated_ranks.clear()
    ctx.terminated_ranks.update(world.dead)
    state.rank, state.world_size = rank, len(world)
    if world.active is None:
        state.active_rank = state.active_world_size = None
    else:
        Placement(rank, len(world), world.active).apply_to(state)
