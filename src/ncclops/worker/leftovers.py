"""What an interrupted run leaves behind in places that no snapshot shows.

Callbacks at exit, handlers of named loggers, threads: the next run of the script adds its own, and
those of the last one would act a second time, or keep the process from ending.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any


class _AtExit:
    """Remembers what a script registers at exit, so that an interrupted run's can be dropped.

    Callbacks that a library registers while it is imported are kept, since an import does not
    happen again; unless it fails.
    """

    def __init__(self) -> None:
        self._registered: list[tuple[Callable[..., Any], str | None]] = []  # in the import of what
        self._register = atexit.register

    def watch(self) -> None:
        """Start remembering."""
        atexit.register = self._remember  # type: ignore[assignment]

    def _remember(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._registered.append((function, _under_import()))
        return self._register(function, *args, **kwargs)

    def forget(self) -> None:
        """Unregister what the run that ended has registered."""
        for function, module in self._registered:
            if module is None or module not in sys.modules:
                atexit.unregister(function)
        self._registered.clear()


def _under_import() -> str | None:
    """The module whose code runs to import it: the innermost, if there are several."""
    frame: FrameType | None = sys._getframe(2)
    called: FrameType | None = None
    while frame is not None:
        if called is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            return str(called.f_globals.get("__name__"))
        frame, called = frame.f_back, frame
    return None


class _LogHandlers:
    """Lets a handler replace the like one that an earlier run has added to the same logger.

    The earlier ones are not taken away beforehand: a module that stays imported may remember that
    it has set up its logger, and would not do so again.
    """

    def __init__(self) -> None:
        self._run = 0
        self._added_in: weakref.WeakKeyDictionary[logging.Handler, int] = (
            weakref.WeakKeyDictionary()
        )

    def watch(self) -> None:
        """Start remembering."""
        add, remember = logging.Logger.addHandler, self._remember

        def add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
            remember(logger, handler)
            add(logger, handler)

        logging.Logger.addHandler = add_handler  # type: ignore[method-assign, assignment]

    def begin_run(self) -> None:
        """What was added until now is from earlier runs."""
        self._run += 1

    def _remember(self, logger: logging.Logger, handler: logging.Handler) -> None:
        for earlier in list(logger.handlers):
            stale = self._added_in.get(earlier, self._run) < self._run
            if stale and earlier is not handler and _target(earlier) == _target(handler):
                logger.removeHandler(earlier)
                earlier.close()
        self._added_in[handler] = self._run


def _target(handler: logging.Handler) -> tuple[Any, ...]:
    """What makes two handlers say everything twice."""
    stream = getattr(handler, "stream", None)
    return type(handler), getattr(handler, "baseFilename", None) or id(stream)


class _Threads:
    """Knows the threads that earlier runs have left running: they cannot be ended from outside.

    A thread of an executor that a module keeps works for later runs as well: it is one of an
    earlier run only while it is at a task of that.
    """

    def __init__(self) -> None:
        self._left = weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]]()

    def note(self, ours: set[threading.Thread]) -> None:
        """The run has ended; what runs now and is not among ``ours`` is its own."""
        tasks = _tasks()
        for thread in threading.enumerate():
            if thread not in ours:
                # No reference to a task: it holds what the script has handed to it.
                self._left[thread] = weakref.ref(tasks.get(thread.ident, thread))

    def keep_the_process(self) -> list[str]:
        """Names of threads of earlier runs for which the interpreter would wait at its end."""
        return sorted(t.name for t in self._held() if not t.daemon)

    def join_others(self) -> None:
        """Wait for the threads of the run that has ended well, as the interpreter would."""
        held = self._held()
        _have_executors_end()
        for thread in threading.enumerate():
            is_its_own = thread is not threading.current_thread() and thread not in held
            if is_its_own and not thread.daemon:
                thread.join()

    def names(self) -> list[str]:
        """Names of all threads of earlier runs that still run."""
        return sorted(t.name for t in self._left if t.is_alive())

    def _held(self) -> set[threading.Thread]:
        """The threads that still do what an earlier run had them do, with nothing behind that."""
        tasks = _tasks()
        return {
            thread
            for thread, task in self._left.items()
            if thread.is_alive()
            and (at := tasks.get(thread.ident, thread)) is not _IDLE
            and at is task()
            and not _has_more_to_do(thread)
        }


class _Idle:
    """In the place of a task."""


_IDLE = _Idle()


def _tasks() -> dict[int | None, object]:
    """What each thread of a ``ThreadPoolExecutor`` is at, by the thread's identifier."""
    # No public name for it; where a version of Python has none, its threads are as all others.
    worker = getattr(getattr(_executors(), "_worker", None), "__code__", None)
    tasks: dict[int | None, object] = {}
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top
        called: FrameType | None = None
        while frame is not None and frame.f_code is not worker:
            called, frame = frame, frame.f_back
        if frame is not None:
            tasks[thread] = _IDLE if called is None else called.f_locals.get("self", _IDLE)
    return tasks


def _has_more_to_do(thread: threading.Thread) -> bool:
    """Whether tasks wait for this thread of an executor."""
    queue = getattr(_executors(), "_threads_queues", {}).get(thread)
    return queue is not None and queue.qsize() > 0


def _executors() -> ModuleType | None:
    return sys.modules.get("concurrent.futures.thread")


def _have_executors_end() -> None:
    """Have idle threads of executors end, as the interpreter does before it waits for threads.

    It calls what ``concurrent.futures`` has left with it for that. Here that is called in threads:
    it also waits for the executors' threads of earlier runs, which may never end.
    """
    # No public name for it.
    for callback in reversed(getattr(threading, "_threading_atexits", [])):
        threading.Thread(target=callback, name="ncclops-executors", daemon=True).start()


atexit_callbacks = _AtExit()
log_handlers = _LogHandlers()
threads = _Threads()


def watch() -> None:
    """Remember what a script leaves, from now on."""
    atexit_callbacks.watch()
    log_handlers.watch()


def forget_accelerate() -> None:
    """Have Accelerate, where it is in use, look at its process anew.

    It keeps, for the life of the process, that the default group has been made; after a restart
    there is none. The Trainer of ``transformers`` does the same whenever its arguments are made.
    """
    if (state := sys.modules.get("accelerate.state")) is not None:
        with suppress(AttributeError):  # of another version, whose scripts have to do it
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def forget_deepspeed() -> None:
    """Have DeepSpeed, where it is in use, make its process groups anew, as after an end of its own.

    It keeps those of the start before, which no longer exist.
    """
    with suppress(AttributeError):  # of a version before 0.19
        if (groups := sys.modules.get("deepspeed.utils.groups")) is not None:
            groups._release_process_group_references(group=None)
        if (comm := sys.modules.get("deepspeed.comm.comm")) is not None:
            setattr(comm, "cdb", None)  # noqa: B010 - no attribute of every module


def end_process(code: int) -> None:
    """End the process if threads of an interrupted run would keep it from ending by itself.

    The code that would have stopped them was interrupted. Exit callbacks run as usual; the
    threads of the run that ended well are waited for.
    """
    kept_by = threads.keep_the_process()
    if not kept_by:
        return
    threads.join_others()
    sys.stderr.write(f"ncclops: threads of an interrupted run are left: {', '.join(kept_by)}\n")
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
