"""``error-<attempt>.json``: the exception of a worker, in torchelastic's format, read back.

The worker entry writes it, and so does a script's ``@record``; scripts can write anything there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ncclops.moments import LATEST_S
from ncclops.plain_text import plain_line
from ncclops.record.regular_file import read_regular

# A traceback with long values in it; a larger file is no traceback.
_MOST_BYTES = 1 << 20
_MOST_CHARS = 1000


@dataclass(frozen=True)
class RecordedError:
    """An exception: ``message`` as its type and text; what the file does not say is None.

    ``at`` is in seconds since the epoch.
    """

    message: str
    traceback: str | None
    at: float | None = None

    @property
    def headline(self) -> str | None:
        """The first line of the message that is not empty, in short; None without one."""
        first = next(filter(None, map(str.strip, self.message.splitlines())), None)
        return None if first is None else plain_line(first, _MOST_CHARS)

    @property
    def is_system_exit(self) -> bool:
        """Whether it is the text that the script has handed to ``sys.exit``."""
        return (self.traceback or "").rstrip().endswith(f"SystemExit: {self.message.rstrip()}")


def read_error(path: Path) -> RecordedError | None:
    """What ``path`` holds; None if it is not there, or is no such file."""
    try:
        return parse_error(read_regular(path, _MOST_BYTES))
    except OSError:
        return None


def parse_error(raw: bytes) -> RecordedError | None:
    """The exception that ``raw``, the content of such a file, describes; None if it is none.

    ``{"message": {"message": "KeyError: 'x'", "extraInfo": {"py_callstack", "timestamp"}}}``
    """
    try:
        message = json.loads(raw)["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if isinstance(message, str):
        return RecordedError(message, message)
    if not isinstance(message, dict) or "message" not in message:
        return None
    extra = message.get("extraInfo")
    facts = extra if isinstance(extra, dict) else {}
    traceback = facts.get("py_callstack")
    return RecordedError(
        message=str(message["message"]),
        traceback=None if traceback is None else str(traceback),
        at=_time(facts.get("timestamp")),
    )


def _time(value: object) -> float | None:
    """Seconds since the epoch; torchelastic writes them as text, in whole seconds."""
    try:
        seconds = float(value) if isinstance(value, str | int | float) else 0.0
    except (ValueError, OverflowError):
        return None
    return seconds if 0 < seconds <= LATEST_S else None
