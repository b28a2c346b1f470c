"""Rank assignment: who is which rank in the next iteration, and who is active.

Two ways to run the same decision:

- *rank by rank*: ``assignment(ctx)`` on every living rank, as the public API has it. This is
  the only way for a user's own ``RankAssignment``. ``assign(assignment, ctx)`` wraps it.
- *globally*: ``plan(assignment, world)`` on one rank, for all. The wrapper takes this way when
  ``supports_global_plan(assignment)``::

      keys = local_keys(assignment, state)      # on each rank; gather when there are any
      world = World(initial_ranks=..., keys=...)             # once, at the start
      ...
      world = world.losing(initial_ranks_lost)               # after each iteration
      world = world.with_keys({initial_rank: keys, ...})     # if keys_change(assignment)
      world = plan(assignment, world)                        # on one rank
      placements(world)                         # {initial_rank: Placement}: publish

  A rank that is in the old world and has no placement is discarded and has to leave with
  ``RankDiscarded``. ``plan`` is deterministic, so it may as well run on every rank from the same
  world. ``World`` and ``Placement`` turn into text and back for the store.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from ncclops.restart._assignment import tree as _tree
from ncclops.restart._assignment import world as _world
from ncclops.restart._assignment.base import (
    GATHER_TIMEOUT,
    KeyFunction,
    KeyOrFn,
    PlannedAssignment,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    as_key_function,
    as_of_launch,
    whole_number,
)
from ncclops.restart._assignment.planning import (
    assign,
    keys_change,
    local_keys,
    plan,
    supports_global_plan,
)
from ncclops.restart._assignment.tree import Layer, LayerFlag, Topology
from ncclops.restart._assignment.world import Placement, World, placements
from ncclops.restart.state import Mode

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "FillGaps",
    "FilterCountGroupedByKey",
    "FilterGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "Placement",
    "PlannedAssignment",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
    "World",
    "assign",
    "keys_change",
    "local_keys",
    "placements",
    "plan",
    "supports_global_plan",
]


class ShiftRanks(PlannedAssignment):
    """Survivors shift left over the gaps, in their old order. Who is active is decided anew."""

    renumbers = True

    def plan(self, world: World, column: int = 0) -> World:  # noqa: ARG002 - uses no keys
        """See ``PlannedAssignment.plan``."""
        return _world.shift(world)


class FillGaps(PlannedAssignment):
    """Survivors with the highest ranks move into the gaps; all others keep their rank.

    Who is active is decided anew.
    """

    renumbers = True

    def plan(self, world: World, column: int = 0) -> World:  # noqa: ARG002 - uses no keys
        """See ``PlannedAssignment.plan``."""
        return _world.fill_gaps(world)


class ActivateAllRanks(PlannedAssignment, RankFilter):
    """Every healthy rank calls the function. Not to be combined with other filters."""

    sole_filter = True

    def plan(self, world: World, column: int = 0) -> World:  # noqa: ARG002 - uses no keys
        """See ``PlannedAssignment.plan``."""
        return _world.activate_all(world)


class MaxActiveWorldSize(PlannedAssignment, RankFilter):
    """At most ``max_active_world_size`` ranks are active (``None``: no limit), the lowest ones.

    Raises ``ValueError`` when the limit is below 1, ``TypeError`` when it is no whole number.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None:
            max_active_world_size = whole_number("max_active_world_size", max_active_world_size, 1)
        self.max_active_world_size = max_active_world_size

    def plan(self, world: World, column: int = 0) -> World:  # noqa: ARG002 - uses no keys
        """See ``PlannedAssignment.plan``."""
        return _world.limit_active(world, self.max_active_world_size)


class ActiveWorldSizeDivisibleBy(PlannedAssignment, RankFilter):
    """The active world is the largest multiple of ``divisor``; it may come to 0.

    Raises ``ValueError`` when ``divisor`` is below 1, ``TypeError`` when it is no whole number.
    """

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = whole_number("divisor", divisor, 1)

    def plan(self, world: World, column: int = 0) -> World:  # noqa: ARG002 - uses no keys
        """See ``PlannedAssignment.plan``."""
        return _world.round_active(world, self.divisor)


class FilterCountGroupedByKey(PlannedAssignment):
    """Ranks of every group whose number of living members fails ``condition`` are terminated.

    ``key_or_fn`` is a key or a function from this rank's ``State`` to it (``str`` is applied),
    evaluated anew in each iteration. It only marks ranks; ``ShiftRanks`` or ``FillGaps``, listed
    before it, has to take them out. ``timeout`` bounds the wait for other ranks' keys when it
    runs rank by rank; planned globally, keys come with the barrier and ``barrier_timeout`` does.

    Raises ``TypeError`` on a value of a wrong type, ``ValueError`` unless ``timeout`` is positive.
    """

    marks_ranks = True

    def __init__(
        self,
        key_or_fn: KeyOrFn,
        condition: Callable[[int], bool],
        timeout: timedelta = GATHER_TIMEOUT,
    ) -> None:
        if not callable(condition):
            raise TypeError(f"{condition=} must be a function of the number of ranks in a group")
        if not isinstance(timeout, timedelta):
            raise TypeError(f"{timeout=} must be a timedelta")
        if timeout <= timedelta(0):
            raise ValueError(f"timeout={timeout} must be positive")
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        self._key = as_key_function(key_or_fn)

    @property
    def key_functions(self) -> tuple[KeyFunction, ...]:
        """The one key that groups ranks."""
        return (self._key,)

    def plan(self, world: World, column: int = 0) -> World:
        """See ``PlannedAssignment.plan``."""
        return _world.drop_groups(world, column, self.condition)


class FilterGroupedByKey(FilterCountGroupedByKey):
    """Deprecated name of ``FilterCountGroupedByKey``."""

    def __init__(
        self,
        key_or_fn: KeyOrFn,
        condition: Callable[[int], bool],
        timeout: timedelta = GATHER_TIMEOUT,
    ) -> None:
        warnings.warn(
            "FilterGroupedByKey is now rank_assignment.FilterCountGroupedByKey",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(key_or_fn, condition, timeout)


class Tree(PlannedAssignment):
    """Assignment over a topology tree with reserves; not to be composed with anything.

    ``layers`` go from the root, which has one key for all ranks, to the innermost one; see
    ``Layer`` and ``LayerFlag``. At first, ranks are activated depth first as far as every
    ``max_ranks`` allows. After losses, in this order: branches below ``min_ranks`` are given up;
    lost active ranks are replaced from the nearest reserve; gaps are backfilled; ranks shift
    left; ``world_size_filter``, called with the number of active ranks, may return a smaller one,
    and what is left over becomes the reserve that returns first.

    Raises ``ValueError`` without layers, ``TypeError`` on what is no layer or no function,
    ``RuntimeError`` (when called) without a common root, and warns when the depth-first order is
    not the order of the ranks at launch.
    """

    renumbers = True
    keys_last = True
    stands_alone = True

    def __init__(
        self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None
    ) -> None:
        if isinstance(layers, Layer) or not isinstance(layers, Iterable):
            raise TypeError(f"the layers of a Tree are a list of Layer objects, not {layers!r}")
        self.layers = tuple(layers)
        if not self.layers:
            raise ValueError("Tree needs at least one Layer, the root")
        if wrong := [layer for layer in self.layers if not isinstance(layer, Layer)]:
            raise TypeError(f"the layers of a Tree are Layer objects, and {wrong[0]!r} is none")
        if world_size_filter is not None and not callable(world_size_filter):
            raise TypeError(f"{world_size_filter=} must be a function of a world size, or None")
        self.world_size_filter = world_size_filter
        self._keys = tuple(as_key_function(layer.key_or_fn) for layer in self.layers)
        self._remembered: World | None = None  # only when it runs rank by rank

    @property
    def key_functions(self) -> tuple[KeyFunction, ...]:
        """One key per layer, as of the launch."""
        return tuple(map(as_of_launch, self._keys))

    def plan(self, world: World, column: int = 0) -> World:  # noqa: ARG002 - never composed
        """See ``PlannedAssignment.plan``."""
        if world.active is None:
            _warn_about_order(world, self.layers)
        return _tree.assign(world, self.layers, self.world_size_filter)

    def _world_before(self, ctx: RankAssignmentCtx) -> World:
        # Who is where and who was active is known from the last call, so only the first one of a
        # job gathers keys. A later job of the same process starts with a fresh state.
        last = self._remembered
        if last is not None and ctx.state.mode is not Mode.INITIALIZED:
            return dataclasses.replace(last, dead=frozenset(ctx.terminated_ranks))
        return dataclasses.replace(super()._world_before(ctx), active=None)

    def _remember(self, world: World) -> None:
        self._remembered = world


def _warn_about_order(world: World, layers: Sequence[Layer]) -> None:
    order = Topology.over(world, layers).depth_first(world)
    if order != sorted(order):
        warnings.warn(
            "the depth-first order of the Tree differs from the order of the ranks at launch: "
            "ranks are renumbered already in the first iteration",
            UserWarning,
            stacklevel=4,
        )
