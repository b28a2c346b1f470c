"""Finding the parameters of a function that want the ``CallWrapper``, and filling them in."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# As ``inspect.Signature.bind`` has it.
_MISSING = re.compile(r"missing a required (?:[\w-]+ )?argument: '(\w+)'")


def parameters_of_type(fn: Callable[..., Any], wanted: type) -> list[str]:
    """Names of ``fn``'s parameters annotated with ``wanted``, optional or in a union.

    Annotations that are text (``from __future__ import annotations``) are resolved; where that
    fails, for instance for an import under ``TYPE_CHECKING``, the name of the type decides.
    """
    parameters = inspect.signature(fn).parameters.values()
    return [p.name for p in parameters if _mentions(fn, p.annotation, wanted)]


def bind_injected(
    fn: Callable[..., Any],
    names: Sequence[str],
    value: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Callable[[], Any]:
    """A call of ``fn`` with the caller's arguments and ``value`` for every parameter in ``names``.

    The caller's positional arguments are counted as if those parameters were not there. Raises
    ``TypeError`` as a call would, here and not in each restart anew.
    """
    if not names:
        _check_arguments(fn, args, kwargs)
        return lambda: fn(*args, **kwargs)
    signature = inspect.signature(fn)
    own = [p for p in signature.parameters.values() if p.name not in names]
    theirs = {name: given for name, given in kwargs.items() if name not in names}
    try:
        bound = signature.replace(parameters=own).bind(*args, **theirs)
    except TypeError as error:
        raise _wrong_arguments(fn, error) from None
    full = inspect.BoundArguments(signature, {})
    for name in signature.parameters:
        if name in names:
            full.arguments[name] = value
        elif name in bound.arguments:
            full.arguments[name] = bound.arguments[name]
    return lambda: fn(*full.args, **full.kwargs)


def _check_arguments(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Only against the parameters of ``fn`` itself: what it shows as those of another function,
    as decorators do, it may fill in."""
    if getattr(fn, "__signature__", None) is not None:
        return
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # of a function in C, for instance
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        missing = _MISSING.match(str(error))
        hint = ""
        if missing is not None:
            hint = f"; if it is to get the CallWrapper, annotate it: {missing[1]}: CallWrapper"
        raise _wrong_arguments(fn, f"{error}{hint}") from None


def _wrong_arguments(fn: Callable[..., Any], what: object) -> TypeError:
    return TypeError(f"{getattr(fn, '__name__', fn)}(): {what}")


def _resolve(fn: Callable[..., Any], annotation: Any) -> Any:
    if not isinstance(annotation, str):
        return annotation
    while isinstance(fn, functools.partial):
        fn = fn.func
    namespace = getattr(inspect.unwrap(fn), "__globals__", {})
    try:
        return eval(annotation, dict(namespace))
    except Exception:  # noqa: BLE001 - any name in it may be unknown at run time
        return annotation


def _mentions(fn: Callable[..., Any], annotation: Any, wanted: type) -> bool:
    if isinstance(annotation, typing.ForwardRef):  # text within an annotation
        annotation = annotation.__forward_arg__
    annotation = _resolve(fn, annotation)
    if isinstance(annotation, str):
        return re.search(rf"(^|[\s.\[|]){wanted.__name__}($|[\s\]|,])", annotation) is not None
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_mentions(fn, part, wanted) for part in parts)
    if typing.get_origin(annotation) is typing.Annotated:
        return _mentions(fn, parts[0], wanted)
    return isinstance(annotation, type) and issubclass(annotation, wanted)
