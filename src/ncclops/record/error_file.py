"""``error-<attempt>.json``: the exception of a worker, in torchelastic's format, read back.

The worker entry writes it, and so does a script's ``@record``; scripts can write anything there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

# A traceback with long values in it; a larger file is no traceback.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class RecordedError:
    """An exception: ``message`` as its type and text, ``traceback`` None where it is not said."""

    message: str
    traceback: str | None

    @property
    def headline(self) -> str | None:
        """The first line of the message that is not empty; None without one."""
        return next(filter(None, map(str.strip, self.message.splitlines())), None)


def read_error(path: Path) -> RecordedError | None:
    """What ``path`` holds; None if it is not there, or is no such file."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        message = None if len(raw) > _MOST_BYTES else json.loads(raw)["message"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if isinstance(message, str):
        return RecordedError(message, message)
    if not isinstance(message, dict) or "message" not in message:
        return None
    extra = message.get("extraInfo")
    traceback = extra.get("py_callstack") if isinstance(extra, dict) else None
    return RecordedError(str(message["message"]), None if traceback is None else str(traceback))
