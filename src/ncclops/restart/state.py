"""Who a rank is: its numbers at launch, its numbers now, and what it is doing."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterable, MutableMapping

RETURNING = "NCCLOPS_RETURNING"
"""Set to 1 for a process that takes the place of a lost rank, besides ``RANK`` and the others."""


def take_returning(environ: MutableMapping[str, str]) -> bool:
    """Whether this process was started to take the place of a lost rank; true only once."""
    return environ.pop(RETURNING, None) == "1"


class Mode(enum.Enum):
    """What a rank does in the current iteration."""

    INITIALIZED = enum.auto()  # known, not yet assigned
    ACTIVE = enum.auto()  # calls the wrapped function
    INACTIVE = enum.auto()  # healthy and idle: a reserve for later iterations
    TERMINATED = enum.auto()  # out of the job


@dataclasses.dataclass
class State:
    """The mutable view of one rank that a ``RankAssignment`` works on.

    ``rank`` and ``world_size`` count every healthy rank, reserves included; ``active_rank`` and
    ``active_world_size`` count the ranks that call the wrapped function (``active_rank`` is
    ``None`` on a reserve). ``initial_rank`` and ``initial_world_size`` are what the launcher gave
    and never change; left out, they are ``rank`` and ``world_size``. ``iteration`` counts
    restarts from 0. ``fn_exception`` is what this very rank raised in the current iteration;
    ``None`` where the fault was another rank's.
    """

    rank: int
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int = None  # type: ignore[assignment] # None only until __post_init__
    initial_world_size: int = None  # type: ignore[assignment]
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None

    def __post_init__(self) -> None:
        # getattr, because to the type checker these fields never are None
        if getattr(self, "initial_rank", None) is None:
            self.initial_rank = self.rank
        if getattr(self, "initial_world_size", None) is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> State:
        """The state at launch, from ``RANK`` (else 0) and ``WORLD_SIZE`` (else 1).

        Raises ``ValueError`` when they are not integers or the rank is not inside the world.
        """
        rank, world_size = _env_int("RANK", 0), _env_int("WORLD_SIZE", 1)
        if not 0 <= rank < world_size:
            raise ValueError(
                f"RANK={rank} is not within WORLD_SIZE={world_size}: "
                "the launcher has to set both, counting ranks from 0"
            )
        return cls(rank=rank, world_size=world_size)

    def set_distributed_vars(self) -> None:
        """Write ``RANK`` and ``WORLD_SIZE`` as the wrapped function should see them.

        These are the *active* numbers. On a reserve ``RANK`` becomes the text ``None``, so that
        code which reads it there by mistake fails at once instead of posing as another rank.
        """
        os.environ["RANK"] = str(self.active_rank)
        os.environ["WORLD_SIZE"] = str(self.active_world_size)

    def advance(self) -> None:
        """Enter the next iteration, forgetting the exception of the last one."""
        self.iteration += 1
        self.fn_exception = None

    def join_anew(self, iteration: int) -> None:
        """Become as at launch again, before ``iteration``: ranks are assigned from the start."""
        launch = State(self.initial_rank, self.initial_world_size, iteration=iteration)
        self.copy_from(launch)

    def freeze(self) -> FrozenState:
        """An immutable copy, which is what user callbacks are given."""
        return FrozenState(**{name: getattr(self, name) for name in FIELD_NAMES})

    def copy_from(self, other: State | FrozenState, fields: Iterable[str] | None = None) -> None:
        """Take over ``fields`` (all of them when ``None``) from ``other``.

        Raises ``ValueError`` on a name that is no field.
        """
        names = FIELD_NAMES if fields is None else tuple(fields)
        unknown = [name for name in names if name not in FIELD_NAMES]
        if unknown:
            raise ValueError(f"State has no field {', '.join(unknown)}; it has {FIELD_NAMES}")
        for name in names:
            setattr(self, name, getattr(other, name))


FIELD_NAMES = tuple(field.name for field in dataclasses.fields(State))


@dataclasses.dataclass(frozen=True)
class FrozenState:
    """A ``State`` that refuses assignment with ``dataclasses.FrozenInstanceError``."""

    rank: int
    world_size: int
    active_rank: int | None
    active_world_size: int | None
    initial_rank: int
    initial_world_size: int
    iteration: int
    mode: Mode
    fn_exception: BaseException | None


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not an integer") from None
