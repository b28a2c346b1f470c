"""The agent's own log file, and internal errors of ncclops, which must not stop a run.

Any exception is caught at the boundaries of callbacks, of threads and of what only describes the
run (receipts, goodput, snapshots): it is recorded here, and the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TypeVar

from ncclops.errors import NcclopsError
from ncclops.exhausted import advice, described
from ncclops.plain_text import plain
from ncclops.record.events import InternalErrorEvent
from ncclops.record.log_file import LogFile
from ncclops.record.regular_file import is_there
from ncclops.record.run_directory import RunDirectory

T = TypeVar("T")
log = logging.getLogger(__name__)

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CLOSE_LIMIT_S = 5.0


class AgentLog:
    """The file ``agent.log`` of a run, from :meth:`open` on: records of the loggers ``ncclops.*``.

    What was sent to stderr until then goes through ``say``, which cannot block the agent; nor can
    the disk, as the file is written in a thread, until :meth:`close`.
    """

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._listener: QueueListener | None = None

    def open(self) -> None:
        """Log from now on; a file that cannot be written costs the log, not the run."""
        logger = logging.getLogger("ncclops")
        least = logger.getEffectiveLevel()
        levels = (max(least, each.level) for each in logger.handlers)
        shown = min(levels, default=logging.WARNING)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        terminal = _SayHandler(shown, self._say)
        logger.addHandler(terminal)
        logger.propagate = False
        logger.setLevel(min(shown, logging.INFO))
        try:
            file = LogFile(self._run.paths.agent_log, encoding="utf-8", errors="replace")
        except OSError as error:
            log.warning("no log of the agent: %s", described(error))
            return
        file.setFormatter(_PlainFormatter(_FORMAT))
        records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        listener = QueueListener(records, file)
        try:
            listener.start()
        except RuntimeError as error:  # as many threads as are allowed
            log.warning("no log of the agent: %s", described(error))
            return
        self._listener = listener
        logger.addHandler(QueueHandler(records))

    def close(self) -> None:
        """Write what was logged, as long as a disk that works takes at most."""
        if self._listener is not None:
            ending = threading.Thread(target=_end, args=(self._listener,), daemon=True)
            ending.start()
            ending.join(_CLOSE_LIMIT_S)
            self._listener = None


def _end(listener: QueueListener) -> None:
    listener.stop()
    for handler in listener.handlers:
        with suppress(OSError):  # it writes what it has kept, and the disk takes nothing
            handler.close()


class _PlainFormatter(logging.Formatter):
    """What people read with ``cat`` must not act on their terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class _SayHandler(logging.Handler):
    """Shows a record in a line between the workers' output; tracebacks are in the file."""

    def __init__(self, level: int, say: Callable[[str], None]) -> None:
        super().__init__(level)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.levelname.lower()}: {record.getMessage()}")


class InternalErrors:
    """Exceptions that are mistakes of ncclops: each goes into the log, and into the events.

    Any thread may add one.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.count = 0

    def add(self, doing: str, error: BaseException) -> None:
        """``error`` came up while ``doing`` something, which is left out.

        Where the machine has run out of something, or a file cannot be read, that is a warning, and
        no mistake.
        """
        if isinstance(error, NcclopsError) or advice(error) is not None:
            log.warning("%s failed: %s", doing, described(error))
            return
        self.count += 1
        where = self._run.shown(self._run.paths.agent_log)
        what = f"{type(error).__name__}: {error}"
        see = f" (see {where})" if is_there(self._run.paths.agent_log) else ""
        log.error("internal error in %s: %s%s", doing, what, see, exc_info=error)
        self._run.add(InternalErrorEvent(doing=doing, error=what, log=where))

    @contextmanager
    def recorded(self, doing: str) -> Iterator[None]:
        """An exception inside is recorded and goes no further; the rest of the block is skipped."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the boundary that this class is for
            self.add(doing, error)

    def value_of(self, doing: str, function: Callable[[], T]) -> T | None:
        """What ``function`` returns; None where it fails, which is recorded."""
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - as above
            self.add(doing, error)
            return None

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Record what comes up in callbacks of ``loop``, and in threads."""
        loop.set_exception_handler(self._on_loop_error)
        threading.excepthook = self._on_thread_error

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, message = context.get("exception"), str(context.get("message"))
        self.add("the event loop", error if error is not None else RuntimeError(message))

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread is not None else "a thread"
            self.add(f"thread {name}", args.exc_value)
