"""Grouping keys: what a user gives as ``key_or_fn``, as a function from ``State`` to text."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from ncclops.restart.state import State

KeyOrFn = str | Callable[[State], object] | Callable[[int, int], object]
KeyFunction = Callable[[State], str]


def as_key_function(key_or_fn: KeyOrFn) -> KeyFunction:
    """The key function that ``key_or_fn`` stands for; its result is made text with ``str``.

    A function of two parameters gets ``(rank, world_size)``, as older code expects, with a
    ``DeprecationWarning``. Raises ``TypeError`` for what is neither text nor callable.
    """
    if isinstance(key_or_fn, str):
        return _Constant(key_or_fn)
    if not callable(key_or_fn):
        raise TypeError(f"key_or_fn must be a str or a function of State, not {key_or_fn!r}")
    if _required_parameters(key_or_fn) != 2:
        return _OfState(key_or_fn)
    warnings.warn(
        "key_or_fn(rank, world_size) is deprecated: write a function of one State, such as "
        "lambda state: state.rank // 8",
        DeprecationWarning,
        stacklevel=3,
    )
    return _OfRank(key_or_fn)


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
    except ValueError:  # some built-in functions do not tell
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)
