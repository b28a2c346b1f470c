"""Puts a process back into a state in which the script can run again from its first line.

A script that starts anew in the same process would otherwise add to what its last run left:
handlers on the root logger, callbacks at exit, signal handlers, children.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

# After SIGTERM, for children of an interrupted run; then SIGKILL.
_CHILDREN_GRACE_S = 1.0
# Set by the restart core for the iteration that begins.
_RESTART_CORES = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Snapshot:
    """What a script may change in its process and the next run must find as it was."""

    argv: list[str]
    path: list[str]
    directory: str
    excepthook: Callable[..., Any]
    signals: dict[signal.Signals, Any]
    environ: dict[str, str]
    streams: tuple[Any, Any]
    start_method: str | None
    log_level: int
    log_handlers: list[logging.Handler]

    @classmethod
    def take(cls) -> Snapshot:
        root = logging.getLogger()
        return cls(
            argv=list(sys.argv),
            path=list(sys.path),
            directory=os.getcwd(),  # noqa: PTH109 - a string, to go back to as it is
            excepthook=sys.excepthook,
            signals={number: signal.getsignal(number) for number in _settable_signals()},
            environ=dict(os.environ),
            streams=(sys.stdout, sys.stderr),
            start_method=multiprocessing.get_start_method(allow_none=True),
            log_level=root.level,
            log_handlers=list(root.handlers),
        )

    def restore(self) -> None:
        """Call in the main thread, after the script was left and its groups are aborted."""
        sys.argv, sys.path[:] = list(self.argv), self.path
        with suppress(OSError):
            os.chdir(self.directory)
        sys.excepthook = self.excepthook
        sys.stdout, sys.stderr = self.streams
        numbers = {name: os.environ[name] for name in _RESTART_CORES if name in os.environ}
        os.environ.clear()
        os.environ.update(self.environ | numbers)
        for number, handler in self.signals.items():
            if handler is not None:  # None: not set from Python, and not ours to touch
                signal.signal(number, handler)
        self._restore_logging()
        _end_children()
        multiprocessing.set_start_method(self.start_method, force=True)
        atexit_callbacks.forget()

    def _restore_logging(self) -> None:
        root = logging.getLogger()
        root.setLevel(self.log_level)
        for handler in [h for h in root.handlers if h not in self.log_handlers]:
            root.removeHandler(handler)
            handler.close()
        root.handlers[:] = self.log_handlers


def _settable_signals() -> set[signal.Signals]:
    fixed = {signal.SIGKILL, signal.SIGSTOP}
    return {s for s in signal.valid_signals() if isinstance(s, signal.Signals)} - fixed


def _end_children() -> None:
    """Loader workers and the like; what multiprocessing started and the script has not joined."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    deadline = time.monotonic() + _CHILDREN_GRACE_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    for child in children:
        if child.is_alive():
            child.kill()
            child.join(_CHILDREN_GRACE_S)


class _AtExit:
    """Remembers what a script registers at exit, so that an interrupted run's can be dropped.

    Callbacks of libraries imported meanwhile are among them only if they were registered by the
    script's own thread of calls, which is how most libraries do it once, at import: those are
    kept by ``keep_imports``, since an import does not happen again.
    """

    def __init__(self) -> None:
        self._registered: list[Callable[..., Any]] = []
        self._register = atexit.register

    def watch(self) -> None:
        """Start remembering."""
        atexit.register = self._remember  # type: ignore[assignment]

    def _remember(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not _during_import():
            self._registered.append(function)
        return self._register(function, *args, **kwargs)

    def forget(self) -> None:
        """Unregister what the run that ended has registered."""
        for function in self._registered:
            atexit.unregister(function)
        self._registered.clear()


def _during_import() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


atexit_callbacks = _AtExit()
