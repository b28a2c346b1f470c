"""How files with one JSON object a line are written and read.

What is read may be cut off, damaged or written by something else: it is never a reason to fail.
"""

from __future__ import annotations

import json
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
        """Raises ``OSError`` where ``path`` cannot be opened, or is no regular file."""
        self._lines = LineReader(path)
        self._decode = decode
        self.skipped = 0

    def new(self) -> Iterator[Record]:
        """The records whose lines are complete by now and that were not read before; none while
        the file system gives errors (a disk has failed, a server does not know its file)."""
        while lines := self._lines_read():
            yield from self._decoded(lines)

    def rest(self) -> Iterator[Record]:
        """What stands after the last newline, where nothing more is written."""
        yield from self._decoded(self._lines.rest())

    def reads(self, path: Path) -> bool:
        """Whether ``path`` is still the file that is read here. Raises ``OSError``."""
        return self._lines.reads(path)

    def close(self) -> None:
        self._lines.close()

    def _lines_read(self) -> list[bytes]:
        try:
            return list(self._lines.read())
        except OSError:
            return []

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
