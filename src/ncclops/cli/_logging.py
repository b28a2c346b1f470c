"""What becomes of log records: the only module of the package that configures ``logging``."""

from __future__ import annotations

import logging
import sys

from ncclops.plain_text import plain

_LEVELS = {0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}


class StderrHandler(logging.Handler):
    """Writes records to what ``sys.stderr`` is at that time, as one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler.emit``: a record that cannot be written stops nothing."""
        try:
            text = plain(self.format(record))
            sys.stderr.write(f"ncclops: {record.levelname.lower()}: {text}\n")
        except OSError:
            self.handleError(record)


def configure(verbosity: int) -> None:
    """Send records of the loggers below ``ncclops`` to stderr: warnings and more.

    ``verbosity`` 1 adds information, 2 what is for debugging. The level is the
    handler's: a log file of a run has a level of its own.
    """
    logger = logging.getLogger("ncclops")
    handler = next((each for each in logger.handlers if isinstance(each, StderrHandler)), None)
    if handler is None:
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    handler.setLevel(_LEVELS[max(0, min(2, verbosity))])
    logger.setLevel(min(handler.level, logging.INFO))
