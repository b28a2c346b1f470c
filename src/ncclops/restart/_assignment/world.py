"""The world of ranks as plain data, which rank assignment maps to the next world.

Every decision about ranks is a pure function ``World -> World``, so that one rank can take it
for all and publish it, and so that it can be tested without a process group.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ncclops.restart.state import Mode, State

Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """All ranks of one iteration. A rank's number is its index in ``initial_ranks``.

    - ``initial_ranks``: who the ranks are, by the number they had at launch; each occurs once.
    - ``dead``: numbers (in this world) of ranks that must not be in the next one.
    - ``active``: ranks ``0 .. active - 1`` call the function, the others are reserves; ``None``
      as long as that is undecided (always so before the first assignment).
    - ``surplus``: of the reserves, the first ``surplus`` are there only because a filter wanted
      a smaller world, and come back first when it wants a larger one.
    - ``keys``: per rank, the grouping keys it reported, in the order of ``key_functions``;
      an empty tuple for a rank that died before reporting. Empty when no member needs keys.
    """

    initial_ranks: tuple[int, ...]
    dead: frozenset[int] = frozenset()
    active: int | None = None
    surplus: int = 0
    keys: tuple[Keys, ...] = ()

    def __len__(self) -> int:
        return len(self.initial_ranks)

    @property
    def alive(self) -> list[int]:
        """Numbers of the ranks that are not dead, ascending."""
        return [rank for rank in range(len(self)) if rank not in self.dead]

    def losing(self, initial_ranks: Iterable[int]) -> World:
        """This world with the given ranks (by number at launch) dead; unknown ones are ignored."""
        lost = frozenset(initial_ranks)
        dead = (rank for rank, initial in enumerate(self.initial_ranks) if initial in lost)
        return dataclasses.replace(self, dead=self.dead.union(dead))

    def with_keys(self, keys_by_initial_rank: Mapping[int, Sequence[str]]) -> World:
        """This world with freshly gathered keys.

        Dead ranks keep those of before, for a ``Tree`` has to know from where they were lost;
        living ranks that are not in the mapping have none. So mark losses first.
        """
        known = dict(enumerate(self.keys))
        kept = {self.initial_ranks[rank]: known.get(rank, ()) for rank in self.dead}
        gathered = {**kept, **keys_by_initial_rank}
        keys = (tuple(gathered.get(initial, ())) for initial in self.initial_ranks)
        return dataclasses.replace(self, keys=tuple(keys))

    def reordered(self, ranks: Sequence[int], active: int | None = None, surplus: int = 0) -> World:
        """The next world: ``ranks[i]`` (a number in this world) becomes rank ``i``."""
        return World(
            initial_ranks=tuple(self.initial_ranks[rank] for rank in ranks),
            active=active,
            surplus=surplus,
            keys=tuple(self.keys[rank] for rank in ranks) if self.keys else (),
        )

    def to_json(self) -> str:
        """A compact text that ``from_json`` reads back."""
        fields = [self.initial_ranks, sorted(self.dead), self.active, self.surplus, self.keys]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> World:
        """The world that ``to_json`` wrote."""
        initial_ranks, dead, active, surplus, keys = json.loads(text)
        return cls(
            initial_ranks=tuple(initial_ranks),
            dead=frozenset(dead),
            active=active,
            surplus=surplus,
            keys=tuple(map(tuple, keys)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """What one rank has to know of the next world: small enough to be published rank by rank."""

    rank: int
    world_size: int
    active_world_size: int

    @property
    def active_rank(self) -> int | None:
        """The rank that the wrapped function sees, or ``None`` on a reserve."""
        return self.rank if self.rank < self.active_world_size else None

    @property
    def mode(self) -> Mode:
        """``ACTIVE`` or ``INACTIVE``."""
        return Mode.INACTIVE if self.active_rank is None else Mode.ACTIVE

    def apply_to(self, state: State) -> None:
        """Write this placement into ``state``."""
        state.rank, state.world_size = self.rank, self.world_size
        state.active_rank, state.active_world_size = self.active_rank, self.active_world_size
        state.mode = self.mode


@dataclasses.dataclass(frozen=True, slots=True)
class NoPlace:
    """What a rank has to know that is not in the next world."""


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentFailed:
    """There is no next world: the assignment raised ``error`` (its type and text)."""

    error: str


Place = Placement | NoPlace | AssignmentFailed


def encode_places(places: Mapping[int, Place]) -> list[list[Any]]:
    """``places`` by initial rank, for JSON: one entry for a run of ranks that stay in their order.

    Each is the first and the last rank of the run and what the first becomes: its rank and the
    two world sizes, an error's text, or None.
    """
    runs: list[list[Any]] = []
    follows: tuple[int, Place] | None = None  # what would go on with the last run
    for initial_rank, place in sorted(places.items()):
        if (initial_rank, place) == follows:
            runs[-1][1] = initial_rank
        else:
            runs.append([initial_rank, initial_rank, _encode_place(place)])
        following = place
        if isinstance(place, Placement):
            following = dataclasses.replace(place, rank=place.rank + 1)
        follows = initial_rank + 1, following
    return runs


def decode_place(runs: Sequence[Sequence[Any]], initial_rank: int) -> Place:
    """What ``initial_rank`` becomes. Raises ``ValueError`` where ``runs`` do not say it."""
    for first, last, place in runs:
        if first <= initial_rank <= last:
            return _decode_place(place, initial_rank - first)
    raise ValueError(f"no place of rank {initial_rank} in {runs!r}")


def _encode_place(place: Place) -> list[int] | str | None:
    match place:
        case Placement(rank, world_size, active_world_size):
            return [rank, world_size, active_world_size]
        case AssignmentFailed(error):
            return error
        case NoPlace():
            return None


def _decode_place(encoded: Any, offset: int) -> Place:
    match encoded:
        case [int(rank), int(world_size), int(active_world_size)]:
            return Placement(rank + offset, world_size, active_world_size)
        case str(error):
            return AssignmentFailed(error)
        case None:
            return NoPlace()
    raise ValueError(f"no place of a rank: {encoded!r}")


def placements(world: World) -> dict[int, Placement]:
    """Each rank's placement in a world that was planned, by its number at launch."""
    if world.active is None or world.dead:
        raise ValueError("placements are read from the world that plan() returned")
    size, active = len(world), world.active
    return {
        initial: Placement(rank, size, active) for rank, initial in enumerate(world.initial_ranks)
    }


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
