"""Damage to files: JSON values of other types, sizes and depths, and bytes that are no JSON."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

_SCRIPT = "<script>document.title = 1</script>"
_SCALARS = (
    None,
    True,
    0,
    -1,
    2**70,
    -1e308,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 100_000,
    "\x1b[2J\x1b]0;t\x07\u202e\r",
    "\udc80\x00",
    "../../../../etc/passwd",
    "9" * 5000,
    _SCRIPT,
)
_BYTES = (b"", b"\x00" * 5000, b"\xff\xfe\x00{", b"[" * 200_000, b'{"a":' * 100_000, b"1" * 10_000)


def damage(path: Path, random: Random) -> str:
    """Damage the file in one way; what was done, in words."""
    ways: list[Callable[[Path, Random], str]] = [_be_another_kind, _cut, _scramble, _bytes]
    if path.suffix in (".json", ".jsonl"):
        ways = [_change_value] * 12 + ways
    return f"{path.name}: {random.choice(ways)(path, random)}"


def _change_value(path: Path, random: Random) -> str:
    """Replace or remove one to three values, anywhere in a document or in one line of many."""
    text = path.read_text(errors="surrogateescape")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    if not lines:
        return _bytes(path, random)
    number = random.randrange(len(lines))
    try:
        document = json.loads(lines[number])
    except (ValueError, RecursionError):
        return _bytes(path, random)
    done = []
    for _ in range(random.randint(1, 3)):
        document, what = _changed(document, random)
        done.append(what)
    lines[number] = _text(document)
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
    return f"line {number}: {', '.join(done)}"


def _changed(document: Any, random: Random) -> tuple[Any, str]:
    holder = [copy.deepcopy(document)]
    places = list(_places(holder))
    parent, key = random.choice(places)
    if isinstance(parent, dict) and random.random() < 0.2:
        del parent[key]
        return holder[0], f"without {key!r}"
    value = _value(random, parent[key])
    parent[key] = value
    return holder[0], f"{key!r} is {_text(value)[:40]}"


def _value(random: Random, before: Any) -> Any:
    choice = random.randrange(6)
    if choice == 0:
        return _nested(random.choice((30, 300, 900, 20_000)), random.choice(("[", "{")))
    if choice == 1:
        return [before] * random.choice((2, 1000))
    if choice == 2:
        return {str(n): before for n in range(random.choice((0, 1, 1000)))}
    if choice == 3:
        return []
    return random.choice(_SCALARS)


class _Raw(str):
    """JSON text as it is: deeper than the encoder goes."""

    __slots__ = ()


def _nested(depth: int, kind: str) -> _Raw:
    if kind == "[":
        return _Raw("[" * depth + "]" * depth)
    return _Raw('{"a":' * depth + "1" + "}" * depth)


def _text(document: Any) -> str:
    """As JSON, with the text of ``_Raw`` values in their places."""
    raws: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, _Raw):
            raws.append(value)
            return f"@raw{len(raws) - 1}@"
        if isinstance(value, dict):
            return {key: marked(each) for key, each in value.items()}
        return [marked(each) for each in value] if isinstance(value, list) else value

    text = json.dumps(marked(document))
    for number, raw in enumerate(raws):
        text = text.replace(f'"@raw{number}@"', raw)
    return text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _cut(path: Path, random: Random) -> str:
    data = path.read_bytes()
    kept = random.randrange(len(data) + 1)
    path.write_bytes(data[:kept])
    return f"cut after {kept} bytes"


def _scramble(path: Path, random: Random) -> str:
    data = bytearray(path.read_bytes())
    places = [random.randrange(len(data)) for _ in range(min(20, len(data)))]
    for place in places:
        data[place] = random.randrange(256)
    path.write_bytes(data)
    return f"{len(places)} bytes changed"


def _bytes(path: Path, random: Random) -> str:
    data = random.choice(_BYTES)
    path.write_bytes(data)
    return f"{len(data)} bytes of {data[:6]!r}"


def _be_another_kind(path: Path, random: Random) -> str:
    """Such as a pipe without a writer, a link to itself, or a huge sparse file."""
    path.unlink()
    kind = random.choice(("a directory", "a pipe", "a circular link", "endless", "3 GB", "gone"))
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a circular link":
        path.symlink_to(path.name)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "3 GB":
        with path.open("wb") as file:
            file.truncate(3 << 30)
    return kind
