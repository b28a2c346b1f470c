"""Several callbacks as one."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # To type checkers it is whatever it is composed of: a class below Any is accepted everywhere.
    _Composed = Any
else:
    _Composed = object


class Compose(_Composed):  # type: ignore[misc]
    """Mathematical composition: ``Compose(f, g)(x)`` is ``f(g(x))``, so the last listed runs first.

    Each output is the next input; a tuple is spread over the next one's parameters. A callable
    that was given arguments and returns ``None`` most likely forgot its ``return``: a
    ``UserWarning`` names it, and the next callable gets the arguments that it was given, so that
    a forgotten line does not lose an abort or a clean-up.

    The object is an instance of the lowest class that all ``instances`` have in common, hence a
    composition of ``Abort`` is an ``Abort`` and is accepted wherever one is.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"Compose takes callables, and {instance!r} is not one")
        ancestor = _common_ancestor(instances)
        # mypy takes a class with __call__ for unhashable
        return object.__new__(_composed_class(cls, ancestor))  # type: ignore[arg-type]

    def __init__(self, *instances: Callable[..., Any]) -> None:
        for instance in instances:
            if len(instances) > 1 and (alone := _that_stands_alone(instance)) is not None:
                raise ValueError(f"{type(alone).__name__} cannot be composed with anything")
        self.instances = instances

    def __call__(self, *args: Any) -> Any:
        result: Any = None if not args else args[0] if len(args) == 1 else args
        for instance in reversed(self.instances):
            result = instance(*args)
            if result is None:
                _warn_if_return_is_missing(instance, args)
            else:
                args = result if isinstance(result, tuple) else (result,)
        return result

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"

    def __reduce__(self) -> tuple[type[Compose], tuple[Callable[..., Any], ...]]:
        # The generated class cannot be found by name, which is how pickle looks classes up.
        return Compose, self.instances


def _that_stands_alone(instance: Any) -> Any:
    """``instance``, or one in it, that refuses company, such as a ``Tree``; else ``None``."""
    if isinstance(instance, Compose):
        return next(filter(None, map(_that_stands_alone, instance.instances)), None)
    return instance if getattr(instance, "stands_alone", False) else None


def _warn_if_return_is_missing(instance: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if args:
        warnings.warn(
            f"{instance!r} was called with arguments and returned None; it should return what "
            "the next callable of the Compose is to be called with",
            UserWarning,
            stacklevel=3,
        )


def _common_ancestor(instances: Sequence[Callable[..., Any]]) -> type:
    """The first class in the first instance's MRO that all share and a Compose can stand in for."""
    if not instances:
        return object
    lineages = [type(instance).__mro__ for instance in instances]
    return next(
        cls
        for cls in lineages[0]
        if all(cls in lineage for lineage in lineages[1:]) and _can_stand_in(cls)
    )


def _can_stand_in(cls: type) -> bool:
    """Whether an object that offers ``__call__`` and nothing else can be an instance of ``cls``."""
    is_final = not cls.__flags__ & (1 << 10)  # Py_TPFLAGS_BASETYPE: functions cannot be subclassed
    abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    return not is_final and abstract <= {"__call__"} and not issubclass(cls, Compose)


@functools.cache
def _composed_class(cls: type[Compose], ancestor: type) -> type[Compose]:
    # new_class rather than type(): the ancestor's metaclass (ABCMeta, as a rule) has to win.
    bases = (cls,) if ancestor is object else (cls, ancestor)
    return types.new_class("Compose", bases)
