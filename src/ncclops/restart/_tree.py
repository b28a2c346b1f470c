"""The ``Tree`` rank assignment as a pure function over a ``World``.

The order of the steps is part of the public API: give up branches that are too small, replace
lost active ranks from the nearest reserve, backfill, shift left, filter the size.

A *seat* is an index among the active ranks; its value is the rank that takes it, as a number in
the ending world, or ``None`` while the seat is vacant.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from ncclops.restart._topology import Layer, LayerFlag, Topology
from ncclops.restart._world import World

SizeFilter = Callable[[int], int]
Seats = list[int | None]


def assign(world: World, layers: Sequence[Layer], size_filter: SizeFilter | None = None) -> World:
    """The next world: active ranks first, then what the filter left over, then other reserves.

    Raises ``RuntimeError`` when the ranks have no root in common and ``ValueError`` when
    ``size_filter`` returns a number below 0 or above the one it was given.
    """
    topology = Topology.over(world, layers)
    world = dataclasses.replace(world, dead=world.dead | too_small_branches(topology, world))
    census = Census(topology)
    if world.active is None:
        seated = activate(census, (r for r in topology.depth_first(world) if r not in world.dead))
    else:
        seated = reassign(census, world)
    size = _filtered_size(len(seated), size_filter)
    taken = set(seated)
    idle = [rank for rank in world.alive if rank not in taken]
    return world.reordered(seated + idle, active=size, surplus=len(seated) - size)


def too_small_branches(topology: Topology, world: World) -> set[int]:
    """Living ranks of branches with fewer than ``min_ranks`` of them, inner layers first."""
    alive = set(world.alive)
    lost: set[int] = set()
    for depth in reversed(range(len(topology.layers))):
        healthy = Counter(topology.branches[rank][depth] for rank in alive)
        minimum = topology.layers[depth].min_ranks
        fallen = {rank for rank in alive if healthy[topology.branches[rank][depth]] < minimum}
        lost |= fallen
        alive -= fallen
    return lost


class Census:
    """How many ranks of each branch are active, to keep every ``max_ranks``."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._active: Counter[int] = Counter()

    def has_room(self, rank: int) -> bool:
        """Whether no branch of ``rank`` is full."""
        return not any(map(self._is_full, self.topology.branches[rank]))

    def _is_full(self, branch: int) -> bool:
        limit = self.topology.max_ranks(branch)
        return limit is not None and self._active[branch] >= limit

    def add(self, rank: int) -> None:
        """Count ``rank`` as active."""
        self._active.update(self.topology.branches[rank])


def activate(census: Census, candidates: Iterable[int]) -> list[int]:
    """Those of ``candidates``, taken in order, that fit into all of their branches."""
    chosen = []
    for rank in candidates:
        if census.has_room(rank):
            census.add(rank)
            chosen.append(rank)
    return chosen


def reassign(census: Census, world: World) -> list[int]:
    """The ranks on the seats after losses, in seat order and without gaps."""
    active = world.active or 0
    seats: Seats = [None if rank in world.dead else rank for rank in range(active)]
    for rank in seats:
        if rank is not None:
            census.add(rank)
    taken = replace_from_reserve(census, world, seats)
    backfill(census.topology, seats)
    seated = [rank for rank in seats if rank is not None]
    # Ranks that only an earlier filter sent to the reserve are back before the filter is asked
    # again: otherwise 8 ranks in multiples of 4 would end, after two losses, with 6 idle ones.
    surplus = range(active, active + world.surplus)
    return seated + activate(
        census, (rank for rank in surplus if rank not in world.dead and rank not in taken)
    )


def replace_from_reserve(census: Census, world: World, seats: Seats) -> set[int]:
    """Fill vacant ``seats`` (in place) from the nearest RESERVE domain; returns who was taken.

    All vacancies search one layer before any searches the next one outwards, so none takes a
    reserve that is nearer to another.
    """
    topology = census.topology
    reserve = [r for r in topology.depth_first(world) if r >= len(seats) and r not in world.dead]
    taken: set[int] = set()
    for depth in topology.outwards(LayerFlag.RESERVE):
        queues = _by_branch(topology, reserve, depth)
        # An active rank's number is its seat, so a vacant seat is also the lost rank's number.
        for seat in (seat for seat, rank in enumerate(seats) if rank is None):
            queue = queues.get(topology.branches[seat][depth], deque())
            rank = _next_that_fits(census, queue, taken)
            if rank is not None:
                seats[seat] = rank
                taken.add(rank)
    return taken


def backfill(topology: Topology, seats: Seats) -> None:
    """Inside each BACKFILL domain the active ranks with the largest numbers fill the gaps."""
    # A seat belongs to its rank's branches, or to those of the rank that was lost from it. After
    # a swap this holds for the branches of the domain and further out, which is all that the
    # rest of the search looks at.
    owners = [seat if rank is None else rank for seat, rank in enumerate(seats)]
    for depth in topology.outwards(LayerFlag.BACKFILL):
        domains: dict[int, list[int]] = {}
        for seat, owner in enumerate(owners):
            domains.setdefault(topology.branches[owner][depth], []).append(seat)
        for members in domains.values():
            _backfill_domain(seats, members)


def _backfill_domain(seats: Seats, members: list[int]) -> None:
    last = len(members) - 1
    for first, gap in enumerate(members):
        while last > first and seats[members[last]] is None:
            last -= 1
        if last <= first:
            return
        if seats[gap] is None:
            seats[gap], seats[members[last]] = seats[members[last]], None


def _by_branch(topology: Topology, ranks: Iterable[int], depth: int) -> dict[int, deque[int]]:
    queues: dict[int, deque[int]] = {}
    for rank in ranks:
        queues.setdefault(topology.branches[rank][depth], deque()).append(rank)
    return queues


def _next_that_fits(census: Census, queue: deque[int], taken: set[int]) -> int | None:
    """Pop the first usable rank. The others popped are no loss: room only shrinks meanwhile."""
    while queue:
        rank = queue.popleft()
        if rank not in taken and census.has_room(rank):
            census.add(rank)
            return rank
    return None


def _filtered_size(size: int, size_filter: SizeFilter | None) -> int:
    if size_filter is None or size == 0:
        return size
    wanted = size_filter(size)
    if not 0 <= wanted <= size:
        raise ValueError(
            f"world_size_filter({size}) returned {wanted}: it may only shrink the world"
        )
    return wanted
