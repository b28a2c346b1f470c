"""The topology tree over a ``World``: which branches each rank is in, and their limits."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

from ncclops.restart._keys import KeyOrFn
from ncclops.restart._world import World


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

    Raises ``ValueError`` when ``min_ranks`` is below 0 or ``max_ranks`` below 1.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: KeyOrFn = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        if self.min_ranks < 0:
            raise ValueError(f"Layer(min_ranks={self.min_ranks}) must not be negative")
        if self.max_ranks is not None and self.max_ranks < 1:
            raise ValueError(f"Layer(max_ranks={self.max_ranks}) must be at least 1, or None")

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
