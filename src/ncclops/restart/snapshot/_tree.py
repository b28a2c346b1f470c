"""Nested state, such as what ``state_dict()`` returns, as JSON and a list of tensors.

No pickle: what comes over a wire is read as values, and runs nothing. Kept are ``None``, numbers,
strings, bytes, lists, tuples, dictionaries (with keys of any of these), sets, arrays and numbers of
numpy, and torch's tensors, types, sizes and devices. Anything else is refused by its path. Of a
``defaultdict`` the default is kept where it is one of Python's types; a function is no value, and
with one it is kept as a ``dict``. What stands in two places is one object again.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
_UNCHANGING = (tuple, frozenset)
_MAKES: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


@dataclass
class _Written:
    """What ``flatten`` has come to, in the order of the text: ``leaves``, tensors and arrays with
    their paths, and by their ``id`` the numbers of ``tensors`` among them, and those of ``objects``
    that may be changed, counted as they end."""

    leaves: list[tuple[str, Any]] = field(default_factory=list)
    tensors: dict[int, int] = field(default_factory=dict)
    objects: dict[int, int] = field(default_factory=dict)


@dataclass
class _Read:
    """What ``unflatten`` reads from: ``leaves``, and the ``objects`` that it has made, as they
    end."""

    leaves: Sequence[Any]
    objects: list[Any] = field(default_factory=list)


def flatten(state: Any, path: str = "state") -> tuple[str, list[tuple[str, Any]]]:
    """``state`` as text, and its tensors and arrays with their paths, in the order of the text.

    Raises ``SnapshotError`` on a value that cannot be kept.
    """
    written = _Written()
    text = json.dumps(_encode(state, path, written, 0), separators=(",", ":"))
    return text, written.leaves


def unflatten(text: str | bytes, leaves: Sequence[Any]) -> Any:
    """The state that ``flatten`` was given, with ``leaves`` in the places of its tensors.

    Raises ``ValueError`` for a text that is not from ``flatten``.
    """
    try:
        return _decode(json.loads(text), _Read(leaves), 0)
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a state: {type(error).__name__}: {error}") from error


def _encode(value: Any, path: str, written: _Written, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if abs(value) < 2**62 else {"int": hex(value)}
    if depth > _DEEPEST:
        raise SnapshotError(f"{path[:200]} nests deeper than {_DEEPEST}: does it hold itself?")
    if (number := written.objects.get(id(value))) is not None:
        return {"same": number}
    if kind in _DICTIONARIES or kind in _SEQUENCES:
        node = _encode_container(value, path, written, depth)
        if kind not in _UNCHANGING:
            written.objects[id(value)] = len(written.objects)
        return node
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    return _encode_foreign(value, path, written)


def _encode_container(value: Any, path: str, written: _Written, depth: int) -> Any:
    kind = type(value)
    if kind in _SEQUENCES:
        items = [_encode(v, f"{path}[{i}]", written, depth + 1) for i, v in enumerate(value)]
        return {_SEQUENCES[kind]: items}
    pairs = [
        [
            _encode(k, f"{path}'s key", written, depth + 1),
            _encode(v, f"{path}[{k!r}]", written, depth + 1),
        ]
        for k, v in value.items()
    ]
    if kind is defaultdict and _default_of(value) is not None:
        return {"default": [_default_of(value), pairs]}
    return {_DICTIONARIES[kind]: pairs}


def _default_of(value: defaultdict[Any, Any]) -> str | None:
    """The name of its factory, "" if it has none; ``None`` for one that is not kept."""
    if value.default_factory is None:
        return ""
    names = [name for name, kind in _FACTORIES.items() if kind is value.default_factory]
    return names[0] if names else None


def _encode_foreign(value: Any, path: str, written: _Written) -> Any:
    """Values of torch and numpy; neither has to be imported where there are none."""
    import torch

    if isinstance(value, torch.Tensor):
        if id(value) not in written.tensors:
            written.tensors[id(value)] = len(written.leaves)
            written.leaves.append((path, value))
        return {"tensor": written.tensors[id(value)]}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, path, written)
    raise SnapshotError(
        f"{path[:200]} is a {type(value).__module__}.{type(value).__qualname__}, which snapshots "
        "do not keep: have state_dict() return plain values and tensors"
    )


def _encode_numpy(value: Any, path: str, written: _Written) -> Any:
    import numpy

    is_array = isinstance(value, numpy.ndarray | numpy.generic)
    if is_array and not value.dtype.hasobject and value.dtype.names is None:
        shape, kind = list(value.shape), value.dtype.str
        raw = numpy.frombuffer(value.tobytes(), dtype=numpy.uint8)
        is_scalar = isinstance(value, numpy.generic)
        if not is_scalar:
            written.objects[id(value)] = len(written.objects)
        written.leaves.append((path, raw.copy()))
        return {"array": [len(written.leaves) - 1, kind, shape, is_scalar]}
    raise SnapshotError(f"{path[:200]} is an array of objects or records: not kept")


def _decode(node: Any, read: _Read, depth: int) -> Any:
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise ValueError("not a state: a list without its type")
        return node
    if len(node) != 1 or depth > _DEEPEST + 1:
        raise ValueError("not a state: no single type, or nested too deep")
    ((kind, content),) = node.items()
    if kind == "same":
        return read.objects[content]
    if kind == "default":
        factory, content = content
        pairs = _pairs(content, read, depth)
        value: Any = defaultdict(_FACTORIES[factory] if factory else None, pairs)
    elif kind in _DICTIONARIES.values():
        value = _MAKES[kind](_pairs(content, read, depth))
    elif kind in _MAKES:
        value = _MAKES[kind]([_decode(each, read, depth + 1) for each in content])
    else:
        return _decode_single(kind, content, read)
    if type(value) not in _UNCHANGING:
        read.objects.append(value)
    return value


def _pairs(content: Any, read: _Read, depth: int) -> list[tuple[Any, Any]]:
    return [(_decode(k, read, depth + 1), _decode(v, read, depth + 1)) for k, v in content]


def _decode_single(kind: str, content: Any, read: _Read) -> Any:
    if kind == "tensor":
        return read.leaves[content]
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "complex":
        return complex(*content)
    if kind == "array":
        return _decode_numpy(content, read)
    import torch

    if kind == "size":
        return torch.Size(content)
    if kind == "dtype" and isinstance(found := getattr(torch, content, None), torch.dtype):
        return found
    if kind == "device":
        return torch.device(content)
    raise ValueError(f"not a state: {kind[:40]!r} is no type of a value")


def _decode_numpy(content: Any, read: _Read) -> Any:
    import numpy

    index, kind, shape, is_scalar = content
    dtype = numpy.dtype(kind)
    if dtype.hasobject:
        raise ValueError("not a state: an array of objects")
    array = numpy.frombuffer(read.leaves[index].numpy().tobytes(), dtype=dtype).reshape(shape)
    if is_scalar:
        return array[()]
    read.objects.append(array.copy())
    return read.objects[-1]
