"""Arbitrary events, made from their types."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from ncclops.record.events import TYPES, Event, Rank

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8"))
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: NUMBERS,
    str: TEXT,
    bool: st.booleans(),
    Rank: st.integers(0, 2**31),
    msgspec.UnsetType: st.just(msgspec.UNSET),
    Any: st.none() | TEXT | NUMBERS,
    type(None): st.none(),
}


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values of ``kind``, which is the type of a field."""
    if kind in SCALARS:
        return SCALARS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        limits = next(each for each in arguments if isinstance(each, msgspec.Meta))
        return st.floats(limits.ge, limits.le)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of_type(each) for each in arguments])
    if origin is tuple:
        return st.tuples(*map(of_type, arguments))
    if origin is list:
        return st.lists(of_type(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(TEXT, of_type(arguments[1]), max_size=3)
    return of_struct(kind)


def of_struct(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: of_type(hints[field.name]) for field in msgspec.structs.fields(kind)}
    if issubclass(kind, Event):
        fields["ts"] = st.floats(0, 4e9)
    return st.builds(kind, **fields)


EVENTS: st.SearchStrategy[Event] = st.one_of([of_struct(kind) for kind in TYPES])
