"""The watchdog thread: shows the monitor process that the main thread moves, and reads from it.

Automatic heartbeat: Python runs "pending calls" in the main thread between two bytecodes. The
watchdog registers libc's ``sem_post`` as such a call and, at its next tick, looks whether the
semaphore was raised. No Python frame is involved in the main thread, so an asynchronous exception
can neither hit the heartbeat nor be lost in it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ncclops.restart.log import logged
from ncclops.restart.monitor_process import MonitorProcess

log = logging.getLogger("ncclops.restart")

_libc = ctypes.CDLL(None, use_errno=True)
# A prototype of our own: ``argtypes`` set on ``ctypes.pythonapi`` would hold for all its users.
_add_pending_call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
    ("Py_AddPendingCall", ctypes.pythonapi)
)
_SEM_T_BYTES = 64  # sizeof(sem_t) is 16 or 32 on the C libraries of Linux

# More replacements would not help one that cannot stay up (no memory, no processes left).
_MOST_REPLACEMENTS = 10
# Replacements longer ago than that do not count.
_COUNTED_FOR_S = 600.0


class MainThreadHeartbeat:
    """Whether the main thread has executed bytecode since the last call of ``moved``."""

    # A pending call may still be queued when its owner is gone; the semaphores it posts to must
    # therefore never be freed. One is enough for the process.
    _semaphore: ctypes.Array[ctypes.c_char] | None = None

    def __init__(self) -> None:
        cls = type(self)
        if cls._semaphore is None:
            cls._semaphore = ctypes.create_string_buffer(_SEM_T_BYTES)
            _libc.sem_init(cls._semaphore, 0, 0)
        self._registered = False

    def moved(self) -> bool:
        """True when the call registered before has run; registers the next one."""
        beat = self._registered and _libc.sem_trywait(self._semaphore) == 0
        if beat or not self._registered:
            function = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
            semaphore = ctypes.cast(self._semaphore, ctypes.c_void_p)  # type: ignore[arg-type]
            self._registered = _add_pending_call(function, semaphore) == 0
        return beat


class ProgressWatchdog:
    """Thread that ticks every ``interval`` and serves the monitor process's messages in between.

    ``moves_count`` tells whether a move of the main thread is progress.
    ``on_message`` is called in this thread with each message, ``on_tick`` at each tick. Neither may
    block: the tick is what keeps the monitor process from ending the process.
    """

    def __init__(
        self,
        monitor_process: MonitorProcess,
        interval: timedelta,
        heartbeat_timeout: timedelta,
        moves_count: Callable[[], bool],
        on_message: Callable[[dict[str, Any]], None],
        on_tick: Callable[[], None],
    ) -> None:
        self._monitor_process = monitor_process
        self._interval_s = interval.total_seconds()
        # Sooner than its predecessor in the ring takes the same monitor process for lost.
        self._monitor_timeout_s = heartbeat_timeout.total_seconds() / 2
        self._moves_count = moves_count
        self._on_message = on_message
        self._on_tick = on_tick
        self._heartbeat = MainThreadHeartbeat()
        self._replaced_at: list[float] = []
        self._stopped_until = 0.0
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ncclops-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._monitor_process.page.touch()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)

    def _run(self) -> None:
        clock = self._monitor_process.page.now
        next_tick = clock()
        while True:
            timeout_s = max(0.0, next_tick - clock())
            ready = self._wait(timeout_s)
            if self._stop_fd in ready:
                return
            if ready:
                self._serve()
            if (late_s := clock() - next_tick) >= 0:
                self._tick(late_s)
                next_tick = clock() + self._interval_s

    def _wait(self, timeout_s: float) -> list[int]:
        poller = select.poll()
        poller.register(self._stop_fd, select.POLLIN)
        if self._monitor_process.fileno() >= 0:
            poller.register(self._monitor_process.fileno(), select.POLLIN)
        return [fd for fd, _ in poller.poll(timeout_s * 1000)]

    def _tick(self, late_s: float) -> None:
        monitor, page = self._monitor_process, self._monitor_process.page
        now = page.watchdog_tick = page.now()
        if self._heartbeat.moved() and self._moves_count():
            page.main_beat = now
        with logged("a look at the process groups"):
            self._on_tick()
        timeout_s = max(self._monitor_timeout_s, 2 * self._interval_s)
        if page.monitor_tick == monitor.started_at:  # it has not come up yet: a busy machine
            timeout_s *= 2
        if late_s > timeout_s / 2:  # this process was stopped, and the other one may have been
            self._stopped_until = now
        heard_at = max(page.monitor_tick, self._stopped_until)
        if monitor.pid is not None and now - heard_at > timeout_s:
            log.warning("the monitor process (pid %s) does not respond", monitor.pid)
            self._replace_monitor_process()

    def _serve(self) -> None:
        try:
            while (message := self._monitor_process.receive()) is not None:
                self._on_message(message)
        except EOFError:
            log.warning("the monitor process (pid %s) is gone", self._monitor_process.pid)
            self._replace_monitor_process()

    def _replace_monitor_process(self) -> None:
        now = self._monitor_process.page.now()
        self._replaced_at = [at for at in self._replaced_at if now - at < _COUNTED_FOR_S] + [now]
        try:
            if len(self._replaced_at) > _MOST_REPLACEMENTS:
                raise OSError(f"replaced {_MOST_REPLACEMENTS} times in {_COUNTED_FOR_S:g} s")
            self._monitor_process.replace()
        except OSError as error:
            self._monitor_process.abandon()
            log.error("this rank continues without a monitor process: %s", error)
