"""Nested state, such as what ``state_dict()`` returns, as JSON and a list of tensors.

No pickle: what comes over a wire is read as values, and runs nothing. Kept are ``None``, numbers,
strings, bytes, lists, tuples, dictionaries (with keys of any of these), sets, arrays and numbers of
numpy, and torch's tensors, types, sizes and devices. Anything else is refused by its path. Of a
``defaultdict`` the default is kept where it is one of Python's types; a function is no value, and
with one it is kept as a ``dict``.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ncclops.restart.snapshot._errors import SnapshotError

# More than any model has; a tree that nests deeper is damaged, or refers to itself.
_DEEPEST = 200

_DICTIONARIES: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "dict",
}
_FACTORIES = {
    each.__name__: each for each in (bool, bytes, dict, float, int, list, set, str, tuple)
}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAKES: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def flatten(state: Any, path: str = "state") -> tuple[str, list[tuple[str, Any]]]:
    """``state`` as text, and its tensors and arrays with their paths, in the order of the text.

    Raises ``SnapshotError`` on a value that cannot be kept.
    """
    leaves: list[tuple[str, Any]] = []
    return json.dumps(_encode(state, path, leaves, 0), separators=(",", ":")), leaves


def unflatten(text: str | bytes, leaves: Sequence[Any]) -> Any:
    """The state that ``flatten`` was given, with ``leaves`` in the places of its tensors.

    Raises ``ValueError`` for a text that is not from ``flatten``.
    """
    try:
        return _decode(json.loads(text), leaves, 0)
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a state: {type(error).__name__}: {error}") from error


def _encode(value: Any, path: str, leaves: list[tuple[str, Any]], depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if abs(value) < 2**62 else {"int": hex(value)}
    if depth > _DEEPEST:
        raise SnapshotError(f"{path[:200]} nests deeper than {_DEEPEST}: does it hold itself?")
    if kind in _DICTIONARIES:
        pairs = [
            [
                _encode(k, f"{path}'s key", leaves, depth + 1),
                _encode(v, f"{path}[{k!r}]", leaves, depth + 1),
            ]
            for k, v in value.items()
        ]
        if kind is defaultdict and _default_of(value) is not None:
            return {"default": [_default_of(value), pairs]}
        return {_DICTIONARIES[kind]: pairs}
    if kind in _SEQUENCES:
        items = [_encode(v, f"{path}[{i}]", leaves, depth + 1) for i, v in enumerate(value)]
        return {_SEQUENCES[kind]: items}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    return _encode_foreign(value, path, leaves)


def _default_of(value: defaultdict[Any, Any]) -> str | None:
    """The name of its factory, "" if it has none; ``None`` for one that is not kept."""
    if value.default_factory is None:
        return ""
    names = [name for name, kind in _FACTORIES.items() if kind is value.default_factory]
    return names[0] if names else None


def _encode_foreign(value: Any, path: str, leaves: list[tuple[str, Any]]) -> Any:
    """Values of torch and numpy; neither has to be imported where there are none."""
    import torch

    if isinstance(value, torch.Tensor):
        leaves.append((path, value))
        return {"tensor": len(leaves) - 1}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, path, leaves)
    raise SnapshotError(
        f"{path[:200]} is a {type(value).__module__}.{type(value).__qualname__}, which snapshots "
        "do not keep: have state_dict() return plain values and tensors"
    )


def _encode_numpy(value: Any, path: str, leaves: list[tuple[str, Any]]) -> Any:
    import numpy

    is_array = isinstance(value, numpy.ndarray | numpy.generic)
    if is_array and not value.dtype.hasobject and value.dtype.names is None:
        shape, kind = list(value.shape), value.dtype.str
        raw = numpy.frombuffer(value.tobytes(), dtype=numpy.uint8)
        leaves.append((path, raw.copy()))
        return {"array": [len(leaves) - 1, kind, shape, isinstance(value, numpy.generic)]}
    raise SnapshotError(f"{path[:200]} is an array of objects or records: not kept")


def _decode(node: Any, leaves: Sequence[Any], depth: int) -> Any:
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise ValueError("not a state: a list without its type")
        return node
    if len(node) != 1 or depth > _DEEPEST + 1:
        raise ValueError("not a state: no single type, or nested too deep")
    ((kind, content),) = node.items()
    if kind == "default":
        factory, content = content
        return defaultdict(_FACTORIES[factory] if factory else None, _pairs(content, leaves, depth))
    if kind in _DICTIONARIES.values():
        return _MAKES[kind](_pairs(content, leaves, depth))
    if kind in _MAKES:
        return _MAKES[kind]([_decode(each, leaves, depth + 1) for each in content])
    return _decode_single(kind, content, leaves)


def _pairs(content: Any, leaves: Sequence[Any], depth: int) -> list[tuple[Any, Any]]:
    return [(_decode(k, leaves, depth + 1), _decode(v, leaves, depth + 1)) for k, v in content]


def _decode_single(kind: str, content: Any, leaves: Sequence[Any]) -> Any:
    if kind == "tensor":
        return leaves[content]
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "complex":
        return complex(*content)
    if kind == "array":
        return _decode_numpy(content, leaves)
    import torch

    if kind == "size":
        return torch.Size(content)
    if kind == "dtype" and isinstance(found := getattr(torch, content, None), torch.dtype):
        return found
    if kind == "device":
        return torch.device(content)
    raise ValueError(f"not a state: {kind[:40]!r} is no type of a value")


def _decode_numpy(content: Any, leaves: Sequence[Any]) -> Any:
    import numpy

    index, kind, shape, is_scalar = content
    dtype = numpy.dtype(kind)
    if dtype.hasobject:
        raise ValueError("not a state: an array of objects")
    array = numpy.frombuffer(leaves[index].numpy().tobytes(), dtype=dtype).reshape(shape)
    return array[()] if is_scalar else array.copy()
