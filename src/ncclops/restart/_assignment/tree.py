"""The ``Tree`` rank assignment as pure functions over a ``World``.

The order of the steps is part of the public API: give up branches that are too small, replace
lost active ranks from the nearest reserve, backfill, shift left, filter the size.

A *seat* is an index among the active ranks; its value is the rank that takes it, as a number in
the ending world, or ``None`` while the seat is vacant.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from ncclops.restart._assignment.base import KeyOrFn, whole_number
from ncclops.restart._assignment.world import World


class LayerFlag(enum.Flag):
    """What a search for a replacement may do with the branches of a layer.

    ``RESERVE``: look through the branch for a reserve that takes a lost rank's place.
    ``BACKFILL``: look through the branch for an active rank that moves into a lost rank's place.

    A search starts in the lost rank's innermost branch, goes outwards one layer at a time, and
    ends before the first layer without the flag.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclasses.dataclass(frozen=True)
class Layer:
    """One level of the tree: its branches are the ranks with equal keys within one parent.

    - ``min_ranks``: a branch with fewer healthy ranks is given up as a whole.
    - ``max_ranks``: at most so many ranks of a branch are active; ``None``: no limit.
    - ``key_or_fn``: the key itself, or a function from ``State`` to it. It is evaluated as of
      the launch (``rank`` is the initial rank), so a rank never changes its branch.
    - ``flag``: see ``LayerFlag``.

    Raises ``ValueError`` when ``min_ranks`` is below 0 or ``max_ranks`` below 1, and ``TypeError``
    on a value of a wrong type.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: KeyOrFn = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        whole_number("min_ranks", self.min_ranks, 0)
        if self.max_ranks is not None:
            whole_number("max_ranks", self.max_ranks, 1)
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag={self.flag!r} must be a LayerFlag or None")

    def allows(self, flag: LayerFlag) -> bool:
        """Whether a search of the given kind may go through this layer's branches."""
        return self.flag is not None and flag in self.flag


@dataclasses.dataclass(frozen=True)
class Topology:
    """The tree over one world's ranks.

    ``branches[rank]`` are the ids of the branches a rank is in, outermost first; ``depth_of[id]``
    is the index of a branch's layer. A rank that died before reporting keys is in no branch.
    """

    layers: tuple[Layer, ...]
    branches: tuple[tuple[int, ...], ...]
    depth_of: tuple[int, ...]

    @classmethod
    def over(cls, world: World, layers: Sequence[Layer]) -> Topology:
        """The tree of ``world.keys``. Raises ``RuntimeError`` unless there is a single root."""
        _check_root(world)
        ids: dict[tuple[str, ...], int] = {}
        branches = tuple(
            tuple(ids.setdefault(keys[: depth + 1], len(ids)) for depth in range(len(keys)))
            for keys in world.keys
        )
        return cls(tuple(layers), branches, tuple(len(path) - 1 for path in ids))

    def max_ranks(self, branch: int) -> int | None:
        """How many ranks of ``branch`` may be active at most."""
        return self.layers[self.depth_of[branch]].max_ranks

    def depth_first(self, world: World) -> list[int]:
        """All ranks that are in the tree, branch by branch.

        Ranks of a branch come in their order at launch, and so do branches, by the first of their
        ranks: however ranks were renumbered since, neighbours stay neighbours.
        """
        ranks = [rank for rank, path in enumerate(self.branches) if path]
        ranks.sort(key=lambda rank: world.initial_ranks[rank])
        first: dict[int, int] = {}
        for place, rank in enumerate(ranks):
            for branch in self.branches[rank]:
                first.setdefault(branch, place)
        return sorted(ranks, key=lambda rank: [first[branch] for branch in self.branches[rank]])

    def outwards(self, flag: LayerFlag) -> Iterator[int]:
        """Depths that a search of the given kind goes through, innermost first."""
        for depth in reversed(range(len(self.layers))):
            if not self.layers[depth].allows(flag):
                return
            yield depth


def _check_root(world: World) -> None:
    roots = sorted({keys[0] for keys in world.keys if keys})
    if len(roots) > 1:
        raise RuntimeError(
            f"the first Layer of a Tree is its root and needs one key for all ranks, not "
            f"{len(roots)}: {', '.join(roots[:8])}; put Layer(key_or_fn='root') in front"
        )


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
    wanted = whole_number(f"world_size_filter({size})", size_filter(size))
    if not 0 <= wanted <= size:
        raise ValueError(
            f"world_size_filter({size}) returned {wanted}: it may only shrink the world"
        )
    return wanted
