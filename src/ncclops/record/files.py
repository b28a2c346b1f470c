"""How files of a run directory are written and read: lines of JSON, and documents written whole.

What is read may be cut off, damaged or written by something else: it is never a reason to fail.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ncclops.record.tail import LineReader

Record = TypeVar("Record")
Decode = Callable[[bytes], Record | None]


def encode_line(value: Any) -> bytes:
    """``value`` (structs, dicts, lists, strings, numbers) as one line, with its newline.

    Numbers that are not finite become null; halves of characters, which no file can hold, ``?``.
    """
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=0) + b"\n"
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        return text.encode(errors="replace") + b"\n"


class RecordReader(Generic[Record]):
    """Reads each record of a growing file of lines once, from its beginning.

    ``skipped`` counts the lines that ``decode`` has refused. One reader, one thread.
    """

    def __init__(self, path: Path, decode: Decode[Record]) -> None:
        """Raises ``OSError`` where ``path`` cannot be opened."""
        self._lines = LineReader(path)
        self._decode = decode
        self.skipped = 0

    def new(self) -> Iterator[Record]:
        """The records whose lines are complete by now and that were not read before."""
        while lines := list(self._lines.read()):
            yield from self._decoded(lines)

    def rest(self) -> Iterator[Record]:
        """What stands after the last newline, where nothing more is written."""
        yield from self._decoded(self._lines.rest())

    def close(self) -> None:
        self._lines.close()

    def _decoded(self, lines: Iterator[bytes] | list[bytes]) -> Iterator[Record]:
        for line in lines:
            if not line.strip():  # of LineReader: nothing is complete yet
                continue
            record = self._decode(line)
            if record is None:
                self.skipped += 1
            else:
                yield record


def read_records(path: Path, decode: Decode[Record]) -> list[Record]:
    """All records of ``path``, without lines that cannot be read; none if there is no file."""
    try:
        reader = RecordReader(path, decode)
        try:
            return [*reader.new(), *reader.rest()]
        finally:
            reader.close()
    except OSError:
        return []


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    draft.write_bytes(data)
    draft.replace(path)


def write_document(path: Path, document: Any, indent: int = 1) -> None:
    """Write a JSON file whole or not at all; what has no form in JSON as its text.

    ``indent`` below zero: without spaces. Raises ``OSError``.
    """
    try:
        data = msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=indent)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(document, enc_hook=str)
        text = json.dumps(plain, ensure_ascii=False, indent=indent)
        data = text.encode(errors="replace")
    write_whole(path, data + b"\n")


def decode_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in ``line``, None for anything else."""
    try:
        document = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; an empty one if it is not there, or is none."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def read_list(path: Path) -> list[dict[str, Any]]:
    """The objects in the array in ``path``; none if it is not there, or is no array."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return (
        [each for each in document if isinstance(each, dict)] if isinstance(document, list) else []
    )
