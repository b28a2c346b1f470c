"""Bytes of a dump to plain containers, without executing anything in them.

Meant to run in a separate process (``reader_process``): what remains possible for hostile input
is to use up memory and time, and that process has limits on both.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from typing import Any, NoReturn

# The recorder writes some 500 bytes an entry without stacks and some thousand with them; the
# largest rings in use hold 20,000 entries.
MOST_BYTES = 256 << 20
_GZIP = b"\x1f\x8b"
_PICKLE = b"\x80"


class Unreadable(Exception):
    """A file that cannot be read as a dump; the message says why, without the file's name."""


class NotADump(Unreadable):
    """A file that can be read, and holds something else than a flight recorder's dump."""


def decode(data: bytes) -> dict[str, Any]:
    """The dump in ``data``: a pickle or JSON text, plain or gzip. Raises :class:`Unreadable`."""
    data = unpacked(data)
    if len(data) > MOST_BYTES:
        raise Unreadable(f"larger than {MOST_BYTES >> 20} MiB, which no recorder writes")
    if not data.strip(b"\0 \t\r\n"):
        raise Unreadable("empty: the rank may have died while it wrote")
    loaded = _unpickle(data) if data.startswith(_PICKLE) else _parse_json(data)
    if not isinstance(loaded, dict):
        raise NotADump("holds no dictionary, so it is no flight recorder's dump")
    return loaded


def unpacked(data: bytes) -> bytes:
    """``data`` without gzip around it, where there is some, and up to one byte too much."""
    return _gunzip(data) if data.startswith(_GZIP) else data


def _gunzip(data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            return stream.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Unreadable(f"gzip data that is cut short or damaged ({error})") from None


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise Unreadable("JSON nested deeper than any dump") from None
    except ValueError as error:
        if data.lstrip()[:1] not in (b"{", b"["):
            raise NotADump("neither a pickle nor JSON") from None
        raise Unreadable(f"JSON that is cut short or damaged ({error})") from None


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, numbers and strings. Everything else in a pickle begins with a name."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        named = f"{module_name}.{global_name}"[:80]
        raise Unreadable(f"a pickle that wants to run {named!r}: not a recorder's, not executed")

    def persistent_load(self, _pid: object, /) -> NoReturn:
        raise Unreadable("a pickle that refers to objects outside itself: not a recorder's")


def _unpickle(data: bytes) -> Any:
    try:
        # Buffered: without a way to look ahead, the unpickler asks for each byte by itself.
        return _PlainUnpickler(io.BufferedReader(io.BytesIO(data), 1 << 20)).load()
    except Unreadable:
        raise
    except MemoryError:
        raise Unreadable("a pickle that needs more memory than any dump") from None
    except RecursionError:
        raise Unreadable("a pickle nested deeper than any dump") from None
    except Exception as error:  # noqa: BLE001 - damaged pickles raise whatever they run into
        raise Unreadable(f"a pickle that is cut short or damaged ({brief(error)})") from None


def brief(error: Exception) -> str:
    """An error in half a line."""
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r:.60}"
    return (str(error) or type(error).__name__).splitlines()[0][:120]
