"""The composable rank assignments as pure functions over a ``World``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

from ncclops.restart._world import World


def shift(world: World) -> World:
    """Survivors close the gaps to their left, in their old order."""
    return world.reordered(world.alive)


def fill_gaps(world: World) -> World:
    """Survivors inside the new size keep their number; the others fill the gaps, in order."""
    alive = world.alive
    size = len(alive)
    movers = iter([rank for rank in alive if rank >= size])
    return world.reordered([next(movers) if rank in world.dead else rank for rank in range(size)])


def activate_all(world: World) -> World:
    """Every rank is active."""
    return dataclasses.replace(world, active=len(world))


def limit_active(world: World, limit: int | None) -> World:
    """At most ``limit`` of the ranks that are active so far stay active; ``None``: all do."""
    active = _active_so_far(world)
    return dataclasses.replace(world, active=active if limit is None else min(active, limit))


def round_active(world: World, divisor: int) -> World:
    """The active ranks, reduced to the largest multiple of ``divisor``."""
    active = _active_so_far(world)
    return dataclasses.replace(world, active=active - active % divisor)


def drop_groups(world: World, column: int, keep: Callable[[int], bool]) -> World:
    """Ranks die whose group's number of living members does not satisfy ``keep``.

    The group is what ranks have in common in the given column of their keys.
    """
    alive = world.alive
    sizes = Counter(world.keys[rank][column] for rank in alive)
    # Evaluated once per size: a user's function, and groups are many while sizes are few.
    verdicts = {size: bool(keep(size)) for size in set(sizes.values())}
    lost = (rank for rank in alive if not verdicts[sizes[world.keys[rank][column]]])
    return dataclasses.replace(world, dead=world.dead.union(lost))


def _active_so_far(world: World) -> int:
    """What the filters before this one have left; all ranks where this is the first."""
    return len(world) if world.active is None else min(world.active, len(world))
