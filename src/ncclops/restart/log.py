"""Logging of the main process.

The records of ``ncclops.restart`` go to the stream handler that the application has set up at
the nearest ancestor, and to no other handler: neither into the application's files nor twice.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_NAME = "ncclops.restart"


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """An ``Exception`` inside is logged and goes no further: ``what`` is not worth failing for."""
    try:
        yield
    except Exception as error:
        text = "%s failed: %s: %s"
        logging.getLogger(_NAME).warning(text, what, type(error).__name__, error, exc_info=True)


def set_up_logging(rank: int) -> None:
    """Attach the nearest ancestor's stream handler, once; ``rank`` marks the records."""
    logger = logging.getLogger(_NAME)
    _mark.rank = rank
    if logger.handlers:
        return
    handler = _nearest_stream_handler(logger)
    if handler is None:
        return  # nothing is set up: warnings go to stderr, as Python does for any logger
    logger.addHandler(handler)
    logger.propagate = False


def _nearest_stream_handler(logger: logging.Logger) -> logging.Handler | None:
    ancestor = logger.parent
    while ancestor is not None:
        for handler in ancestor.handlers:
            if type(handler) is logging.StreamHandler:  # a FileHandler is a subclass of it
                return handler
        ancestor = ancestor.parent
    return None


class _RankMark(logging.Filter):
    """Puts the initial rank in front of each message."""

    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if self.rank is not None and not getattr(record, "ncclops_rank", None):
            record.msg = f"[rank {self.rank}] {record.msg}"
            record.ncclops_rank = True
        return True


_mark = _RankMark()
logging.getLogger(_NAME).addFilter(_mark)
