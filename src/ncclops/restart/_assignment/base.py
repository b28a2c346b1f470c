"""What a rank assignment is: its base classes, and the keys by which it groups ranks.

The wrapper gathers keys along with a barrier; ``gather_keys`` serves an assignment that is called
by itself or from a user's own ``RankAssignment``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ncclops.restart._assignment.world import Keys, Placement, World
from ncclops.restart.exception import (
    RestartError,
    TimeoutError,  # noqa: A004 - that is its public name
)
from ncclops.restart.state import State

if TYPE_CHECKING:
    from torch.distributed import Store


KeyOrFn = Hashable | Callable[[State], object] | Callable[[int, int], object]
KeyFunction = Callable[[State], str]


def as_key_function(key_or_fn: KeyOrFn) -> KeyFunction:
    """The key function that ``key_or_fn`` stands for; its result is made text with ``str``.

    A value that is no function is the key of all ranks that give it, such as a host's name. A
    function of two parameters gets ``(rank, world_size)``, as older code expects, with a
    ``DeprecationWarning``.
    """
    if not callable(key_or_fn):
        return _Constant(str(key_or_fn))
    if _required_parameters(key_or_fn) != 2:
        return _OfState(key_or_fn)
    warnings.warn(
        "key_or_fn(rank, world_size) is deprecated: write a function of one State, such as "
        "lambda state: state.rank // 8",
        DeprecationWarning,
        stacklevel=3,
    )
    return _OfRank(key_or_fn)


def whole_number(name: str, value: int, at_least: int | None = None) -> int:
    """``value`` as an ``int``, numpy's integers included.

    Raises ``TypeError`` on any other type and ``ValueError`` below ``at_least``, naming ``name``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a whole number") from None
    if at_least is not None and number < at_least:
        raise ValueError(f"{name}={number} must be at least {at_least}")
    return number


def as_of_launch(key: KeyFunction) -> KeyFunction:
    """``key`` evaluated with the numbers a rank had at launch, so that its answer never changes."""
    return _OfLaunch(key)


# Classes rather than closures, because callbacks are pickled on their way into mp.spawn.


@dataclasses.dataclass(frozen=True)
class _Constant:
    key: str

    def __call__(self, state: State) -> str:  # noqa: ARG002 - a constant
        return self.key


@dataclasses.dataclass(frozen=True)
class _OfState:
    function: Callable[..., Any]

    def __call__(self, state: State) -> str:
        return str(self.function(state))


@dataclasses.dataclass(frozen=True)
class _OfRank:
    function: Callable[..., Any]

    def __call__(self, state: State) -> str:
        return str(self.function(state.rank, state.world_size))


@dataclasses.dataclass(frozen=True)
class _OfLaunch:
    key: KeyFunction

    def __call__(self, state: State) -> str:
        return self.key(State(rank=state.initial_rank, world_size=state.initial_world_size))


def _required_parameters(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def gather_keys(
    store: Store, prefix: str, rank: int, alive: Sequence[int], keys: Keys, timeout: timedelta
) -> dict[int, Keys]:
    """The keys of all ``alive`` ranks, by rank. Called by each of them with its own ``keys``.

    ``prefix`` must be the same on all of them and not have been used before on this store.
    Raises ``exception.TimeoutError`` naming the ranks whose keys were not there in time.
    """
    names = {peer: f"{prefix}/keys/{peer}" for peer in alive}
    collected = f"{prefix}/collected"
    store.set(names[rank], json.dumps(keys))
    if rank == min(alive):
        _wait(store, names, timeout)
        found = {peer: json.loads(store.get(name)) for peer, name in names.items()}
        store.set(collected, json.dumps(list(found.items())))
    # Twice the time: the collecting rank may itself wait nearly as long for the slowest.
    _wait(store, {min(alive): collected}, 2 * timeout)
    return {peer: tuple(found) for peer, found in json.loads(store.get(collected))}


def _wait(store: Store, names: dict[int, str], timeout: timedelta) -> None:
    try:
        store.wait(list(names.values()), timeout)
    except RuntimeError as error:  # DistStoreError and its kinds are RuntimeErrors
        missing = [rank for rank, name in names.items() if not store.check([name])]
        raise TimeoutError(
            f"rank assignment waited {timeout.total_seconds():g} s for ranks {missing[:16]}: "
            "they died or are stuck before it"
        ) from error


GATHER_TIMEOUT = timedelta(seconds=60)  # the default of FilterCountGroupedByKey in the public API


class RankDiscarded(RestartError):
    """The new assignment has no place for this rank: it has to leave."""


@dataclasses.dataclass
class RankAssignmentCtx:
    """What a ``RankAssignment`` is given, changes and returns.

    ``terminated_ranks`` are in the numbering of ``state.rank``; an assignment that renumbers
    ranks replaces the set by an empty one.
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

    def __repr__(self) -> str:
        public = (f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({', '.join(public)})"


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
    sole_filter = False  # whether it refuses other filters beside it
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
        # One rank's state does not have the initial ranks of the others; their current numbers
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
    ctx.terminated_ranks = set(world.dead)  # a new set: the old one is the caller's
    state.rank, state.world_size = rank, len(world)
    if world.active is None:
        state.active_rank = state.active_world_size = None
    else:
        Placement(rank, len(world), world.active).apply_to(state)
