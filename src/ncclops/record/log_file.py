"""A file for log records, of which none raises: on a full disk, or where it cannot be opened."""

from __future__ import annotations

import logging
from contextlib import suppress


class LogFile(logging.FileHandler):
    """Where nothing can be written, records are lost; what wrote them goes on, and prints nothing.

    ``FileHandler`` raises from the call that logs where it cannot open its file then (``delay``).
    """

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002
        """The run's other files report a full disk."""
        return
