"""JSON documents, written whole and read whatever has become of them. Standard library only."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ncclops.record.regular_file import read_regular

# More levels than any document has; the readers below go through them by recursion.
_MOST_LEVELS = 100


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, and through no link. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    draft.unlink(missing_ok=True)  # of a process that had our number, or a link that waits for us
    try:
        with draft.open("xb") as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_document(path: Path, document: Any, indent: int | None = 1) -> None:
    """Write a JSON file whole or not at all; what has no form in JSON as its text.

    Raises ``OSError``.
    """
    write_whole(path, encode(document, indent))


def encode(document: Any, indent: int | None = 1) -> bytes:
    """``document`` as the text of a JSON file; what has no form in JSON as its text."""
    return json.dumps(document, indent=indent, default=str).encode() + b"\n"


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; an empty one if it is not there, or is none."""
    document = _read(path)
    return document if isinstance(document, dict) else {}


def read_list(path: Path) -> list[dict[str, Any]]:
    """The objects in the array in ``path``; none if it is not there, or is no array."""
    document = _read(path)
    return (
        [each for each in document if isinstance(each, dict)] if isinstance(document, list) else []
    )


def load(path: Path) -> Any:
    """The JSON value in ``path``; numbers that are not finite are null.

    Raises ``OSError`` if it cannot be read or is no file of such a size, ``ValueError`` if it holds
    no JSON, or more deeply nested than any document of ours.
    """
    return parse(read_regular(path))


def parse(raw: bytes | str) -> Any:
    """The JSON value in ``raw``; numbers that are not finite are null. Raises ``ValueError``."""
    try:
        value = json.loads(raw, parse_float=_finite, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not _is_shallow(value, _MOST_LEVELS):
        raise ValueError("nested too deeply")
    return value


def _read(path: Path) -> Any:
    try:
        return load(path)
    except (OSError, ValueError):
        return None


def _is_shallow(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)


def _finite(text: str) -> float | None:
    """A number with which one can go on to count; null for all others."""
    value = float(text)
    return value if math.isfinite(value) else None
