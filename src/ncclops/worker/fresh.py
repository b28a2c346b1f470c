"""Puts a process back into a state in which the script can run again from its first line.

A script that starts anew in the same process would otherwise add to what its last run left:
handlers on the root logger, callbacks at exit, signal handlers, children.
"""

from __future__ import annotations

import faulthandler
import functools
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from ncclops.worker import leftovers, pools, process_state, script_imports, torch_settings

_log = logging.getLogger("ncclops.restart")  # into worker.log

# After SIGTERM, for children of an interrupted run; then SIGKILL.
_CHILDREN_GRACE_S = 1.0
_DATA_LOADER_SIGNALS = "torch.utils.data._utils.signal_handling"
# Set by the restart core for the iteration that begins.
_RESTART_CORES = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Snapshot:
    """What a script may change in its process and the next run must find as it was."""

    argv: tuple[str, ...]
    path_list: list[str]
    path: tuple[str, ...]  # what was in it
    directory: str | None
    hooks: dict[str, Any]
    signals: dict[signal.Signals, Any]
    environ: dict[str, str]
    streams: dict[str, Any]
    start_method: str | None
    log_level: int
    log_handlers: tuple[logging.Handler, ...]
    threads: frozenset[threading.Thread]
    torch: dict[str, Any]

    @classmethod
    def take(cls) -> Snapshot:
        root = logging.getLogger()
        return cls(
            argv=tuple(sys.argv),
            path_list=sys.path,
            path=tuple(sys.path),
            directory=process_state.current_directory(),
            hooks={
                "exception": sys.excepthook,
                "thread": threading.excepthook,
                "unraisable": sys.unraisablehook,
            },
            signals={number: signal.getsignal(number) for number in _settable_signals()},
            environ=dict(os.environ),
            streams={"stdout": sys.stdout, "stderr": sys.stderr},
            start_method=multiprocessing.get_start_method(allow_none=True),
            log_level=root.level,
            log_handlers=tuple(root.handlers),
            threads=frozenset(threading.enumerate()),
            torch=torch_settings.read(),
        )

    def with_changes(self, before: Snapshot, after: Snapshot) -> Snapshot:
        """What it would be if what ``before`` and ``after`` differ in had changed before it."""
        names = [each.name for each in fields(self)]
        return Snapshot(
            **{n: _changed(getattr(self, n), getattr(before, n), getattr(after, n)) for n in names}
        )

    def restore(self) -> None:
        """Call in the main thread, after the script was left and its groups are aborted.

        What cannot be put back stays as the script has left it, and is logged: raised, it would be
        an error of this rank in every later start, before its script is entered.
        """
        for part in (
            self._restore_interpreter,
            self.restore_environment,
            functools.partial(torch_settings.write, self.torch),
            _stop_timers,  # before the handlers: without its own an alarm ends the process
            self._restore_signals,
            self._restore_logging,
            _end_children,
            functools.partial(multiprocessing.set_start_method, self.start_method, force=True),
            leftovers.atexit_callbacks.forget,
            leftovers.log_handlers.begin_run,
            leftovers.forget_accelerate,
            leftovers.forget_deepspeed,
            functools.partial(leftovers.threads.note, set(self.threads)),
        ):
            try:
                part()
            except Exception:  # noqa: BLE001 - of the script's own objects, whatever they are
                _log.warning("what the script has changed stays in part", exc_info=True)

    def _restore_interpreter(self) -> None:
        sys.argv = list(self.argv)
        sys.path = self.path_list
        sys.path[:] = self.path
        if self.directory is not None:
            with suppress(OSError):
                os.chdir(self.directory)
        sys.excepthook, threading.excepthook = self.hooks["exception"], self.hooks["thread"]
        sys.unraisablehook = self.hooks["unraisable"]
        sys.stdout, sys.stderr = self.streams["stdout"], self.streams["stderr"]

    def _restore_signals(self) -> None:
        # Its descriptor may be closed by now, and its number that of a connection of ours.
        signal.set_wakeup_fd(-1)
        for number, handler in self.signals.items():
            # What was not set from Python is not ours to touch: None, or unchanged as Python sees
            # it, such as the handlers of faulthandler, by which a crash prints its stacks.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def restore_environment(self) -> None:
        """Of the restart itself it is the first part: what agrees on it reads variables, too."""
        numbers = {name: os.environ[name] for name in _RESTART_CORES if name in os.environ}
        os.environ.clear()
        os.environ.update(self.environ | numbers)

    def _restore_logging(self) -> None:
        root = logging.getLogger()
        root.setLevel(self.log_level)
        for handler in [h for h in root.handlers if h not in self.log_handlers]:
            root.removeHandler(handler)
            with suppress(Exception):  # the script's own; what it has open is gone with its run
                handler.close()
        root.handlers[:] = self.log_handlers


class Start:
    """The process as the script finds it, with what imports of the script have changed since:
    its modules stay imported, and would not change that again."""

    def __init__(self) -> None:
        self._snapshot = Snapshot.take()
        self._imports = script_imports.Watch(Snapshot.take, self._imported)

    def _imported(self, before: Snapshot, after: Snapshot) -> None:
        self._snapshot = self._snapshot.with_changes(before, after)

    def stop(self) -> None:
        """Take no more notice of imports."""
        self._imports.stop()

    def restore(self) -> None:
        """See ``Snapshot``."""
        self._imports.begin_run()
        self._snapshot.restore()

    def restore_environment(self) -> None:
        """See ``Snapshot``."""
        self._snapshot.restore_environment()


def _changed(first: Any, before: Any, after: Any) -> Any:
    """``first``, with what ``before`` and ``after`` differ in; of collections, entry by entry."""
    if before == after:
        return first
    if isinstance(first, dict):
        changed = {
            key: after[key] for key in after if key not in before or after[key] != before[key]
        }
        return {k: v for k, v in (first | changed).items() if k in after or k not in before}
    if isinstance(first, frozenset):
        return (first | after) - (before - after) - (before - first)
    if isinstance(first, tuple):
        added = [each for each in after if each not in before]
        kept = [each for each in first if each in after or each not in before]
        in_front = list(itertools.takewhile(lambda each: each in added, after))
        return (*in_front, *kept, *(each for each in added if each not in in_front))
    return after


@functools.cache
def _settable_signals() -> frozenset[signal.Signals]:
    fixed = {signal.SIGKILL, signal.SIGSTOP}
    return frozenset(s for s in signal.valid_signals() if isinstance(s, signal.Signals)) - fixed


def _stop_timers() -> None:
    """Alarms that the run has set: the handlers of an earlier run are gone."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    faulthandler.cancel_dump_traceback_later()


def _end_children() -> None:
    """Loader workers and the like; what multiprocessing started and the script has not joined."""
    # torch sets its handler for SIGCHLD once in a process, and it was just taken away.
    if (data_loader := sys.modules.get(_DATA_LOADER_SIGNALS)) is not None:
        data_loader._SIGCHLD_handler_set = False  # type: ignore[attr-defined]
    pools.end(_CHILDREN_GRACE_S)
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
