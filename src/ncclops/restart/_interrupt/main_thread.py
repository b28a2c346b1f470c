"""Getting the main thread out of the wrapped function, exactly once, wherever it is.

Three means, in this order:

1. an asynchronous ``RankShouldRestart``, raised between two bytecodes of the main thread;
2. a signal whose handler does nothing, which ends a system call that waits (``sleep``, a lock, a
   socket, a child), whereupon Python raises the exception;
3. whatever the caller adds for waits in C that no signal ends (a store that waits for a dead peer).

A thread that runs gets to the exception by itself, and C code of it that happens to be in a system
call may not expect a signal. So (2) follows at once only where the kernel shows that the thread is
in the same wait as before (1), which also shows that the exception has not arrived; else (2) and
(3) come with the next attempt.

The exception may be swallowed: by a C extension, by ``except BaseException``. It is therefore
raised again until the main thread reports that it is out, but not while the main thread is visibly
cleaning up after it (an ``except``, ``finally`` or ``__exit__`` that handles it) and its stack
moves. In some places it is not raised at all, see ``_interrupt.delicate``. Where Python ignores it
(while a generator is freed, for example) it is raised again as soon as that is over.

The two threads synchronise by single assignments to plain attributes, in an order that works
whichever of them is first; locks serve only to wake the other thread. Any other synchronisation
would itself be code that the exception can hit half-way.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from ncclops.restart._interrupt.delicate import Delicate, how_delicate, is_delicate
from ncclops.restart._interrupt.threads import clear_async_exc, kernel_wait, set_async_exc
from ncclops.restart.exception import RankShouldRestart
from ncclops.restart.raised import comes_from_restart

log = logging.getLogger("ncclops.restart")

# Between two attempts, at first and at most. The first wait is longer than any unwinding that
# does nothing in particular; the cap is the wrapper's monitor_thread_interval.
_FIRST_PAUSE_S = 0.01
# A wait that has lasted for so long is not one of a thread that only runs.
_ASLEEP_S = 0.001
_DELICATE_POLL_S = 0.001
# Clean-up that does not move for so long waits for something, such as a thread that goes on: it is
# interrupted as well.
_STILL_FOR_S = 3.0
# In all, for ``__enter__`` and ``__exit__``: they take microseconds, but for those that wait.
_BRIEFLY_S = 0.1
_STATUS = Path("/proc/self/status")
# What the main thread raises in itself arrives as that call returns. A number, as any time may pass
# between two calls.
_ARRIVES_WITHIN = 1000
# A waiting thread looks again after this time, which is the most that a missed wake-up costs.
_LOOK_AGAIN_S = 0.05


class Interrupter:
    """Shared by the main thread, which runs the function, and the monitor thread, which ends it.

    Main thread: ``arm``; the function, with ``atomic`` sections; ``armed = False``; ``settle``.
    The assignment has to be the first statement of a ``finally``: CPython delivers exceptions at
    calls and at jumps backwards, so that nothing can come between the function and it. After it
    at most two more arrive: one that was pending and one that was just being raised.

    Monitor thread: within ``ending`` (waits for ``atomic`` sections), the abort, which may
    ``raise_ahead``, and ``interrupt`` (returns when the main thread is out). ``thread_id`` is the
    main thread's.
    """

    def __init__(self, thread_id: int, longest_pause_s: float, patience_s: float) -> None:
        self._thread_id = thread_id
        self._longest_pause_s = max(longest_pause_s, _FIRST_PAUSE_S)
        self._patience_s = patience_s  # with clean-up, before it is interrupted as well
        self.armed = False
        # Nothing that is raised in the main thread arrives: Python up to 3.11 keeps the state of
        # each thread that could not be started, under the number of the thread that tried to, and
        # raises it there.
        self.is_deaf = False
        self._raising = False
        self._one_at_a_time = threading.Lock()
        self._outermost: CodeType | None = None  # that has called the function
        self._native_id = os.getpid()  # the main thread's
        self._is_ending = False  # no section is under way, and none will be
        self._leaving_since: float | None = None
        self._ahead: _Attempt | None = None  # what ``raise_ahead`` has done in this iteration
        self._gate = _Gate()
        self._main_is_out = _WakeUp()  # wakes the monitor thread
        self._raising_ended = _WakeUp()  # wakes the main thread

    # --- main thread --------------------------------------------------------------------------

    def arm(self, called_by: CodeType | None = None) -> None:
        """From now on the monitor thread may interrupt this thread, until ``armed`` is False.

        ``called_by`` calls the function, ``None``: what calls this; its callers do not count as
        parts of it.
        """
        self._outermost = called_by or sys._getframe(1).f_code
        self._native_id = threading.get_native_id()
        self._gate = _Gate()
        self.armed = True

    def settle(self) -> None:
        """After ``armed`` was set to False: no exception arrives once this has returned.

        The one that was under way may still hit this very call.
        """
        while True:
            try:
                self._settle()
                return
            except RankShouldRestart:
                continue

    def _settle(self) -> None:
        # The other thread announces that it is about to raise and then looks whether we are still
        # in; we say that we are out and then look at the announcement: one of us sees the other.
        while self._raising:
            self._main_is_out.wake()
            self._raising_ended.wait(_LOOK_AGAIN_S)
        try:
            # In the place of what is pending, and at once. Merely taking that back would leave
            # Python (3.11, at least) looking for an exception after each call from then on: it is
            # slower by a fifth, and code that is traced or profiled does not get on at all.
            for _ in range(_ARRIVES_WITHIN):
                set_async_exc(self._thread_id, _Settled)
        except _Settled:
            return
        clear_async_exc(self._thread_id, None)
        self.is_deaf = True

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """A section that the termination procedure waits for, and that it closes once begun.

        Re-entrant. Raises ``RankShouldRestart`` instead of entering when it has begun.
        """
        gate = self._gate  # the one of this iteration, also if the section outlives it
        gate.enter()
        try:
            yield
        finally:
            gate.leave()

    @property
    def is_overdue(self) -> bool:
        """Whether the main thread goes on although all clean-up has had its time: it swallows what
        is raised again and again, in a loop. Its moves are no progress any more. Any thread.
        """
        since = self._leaving_since
        return since is not None and time.monotonic() - since > self._patience_s

    # --- monitor thread -----------------------------------------------------------------------

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Let the main thread enter no other ``atomic`` section, and wait until it is in none.

        Goes on early if it has left the function meanwhile. A section that never ends is a hang
        of the main thread, and the hard timeout is its deadline.
        """
        gate = self._gate
        while not gate.close() and self.armed:
            gate.left.wait(1.0)
        self._ahead = None
        self._is_ending = True
        try:
            with self._raising_what_is_ignored():
                yield
        finally:
            self._is_ending = False

    def raise_ahead(self) -> None:
        """Raise ``RankShouldRestart`` before something ends a wait of the main thread in C.

        Where such a wait ends without an error the function would go on until ``interrupt``. Does
        nothing outside ``ending``, while the main thread cleans up, or where it is delicate for
        longer than brief. Any other thread.
        """
        with self._announced():
            patience, ends_at = _Patience(self._patience_s), time.monotonic() + 2 * _BRIEFLY_S
            while self.armed and self._is_ending and self._ahead is None:
                now = self._stack()
                if time.monotonic() > ends_at or self._is_busy_leaving(now):
                    return
                if patience.lasts(now, self._how_delicate()):
                    self._main_is_out.wait(_DELICATE_POLL_S)
                else:
                    self._ahead = self._raise(patience)

    def interrupt(self, wake: int | None, unblock: Callable[[FrameType], None]) -> None:
        """Raise ``RankShouldRestart`` in the main thread until it is out.

        ``wake`` is the signal that ends system calls (``None``: there is none to use);
        ``unblock`` is called with the main thread's frame when it still has not moved.
        """
        self._leaving_since = time.monotonic()
        try:
            with self._announced():
                self._raise_until_out(wake, unblock)
        finally:
            self._leaving_since = None

    @contextlib.contextmanager
    def _announced(self) -> Iterator[None]:
        """One thread at a time may raise; see ``_settle``."""
        with self._one_at_a_time:  # an abort that was given up may still ``raise_ahead``
            self._raising = True
            try:
                yield
            finally:
                self._raising = False
                self._raising_ended.wake()

    def _raise_until_out(self, wake: int | None, unblock: Callable[[FrameType], None]) -> None:
        patience, pause_s = _Patience(self._patience_s), _FIRST_PAUSE_S
        last: _Attempt | None = None
        while self.armed:
            now = self._stack()
            if patience.lasts(now, self._how_delicate()):
                # Nothing announces that it is over.
                self._main_is_out.wait(_DELICATE_POLL_S)
                continue
            if not (self._is_busy_leaving(now) and patience.lasts(now, Delicate.YES)):
                if last is not None:
                    self._escalate(unblock, last.stack)
                attempt, self._ahead = self._ahead or self._raise(patience), None
                if attempt is None:
                    continue
                if last is not None or self._has_slept_since(attempt):
                    _send(self._thread_id, wake)
                last = attempt
            if self.armed:  # or it has woken this thread already
                self._main_is_out.wait(pause_s)
            pause_s = min(2 * pause_s, self._longest_pause_s)

    def _raise(self, patience: _Patience) -> _Attempt | None:
        """Raise once; ``None``: the main thread has come to a delicate place meanwhile."""
        attempt = _Attempt(kernel_wait(self._native_id), self._stack())
        if patience.lasts(attempt.stack, self._how_delicate()):
            return None
        set_async_exc(self._thread_id, RankShouldRestart)
        # Since that look it may have run on. From here to the next line it cannot have, unless this
        # thread has lost the GIL twice within a few instructions.
        if patience.lasts(attempt.stack, self._how_delicate()):
            clear_async_exc(self._thread_id, None)
            return None
        return attempt

    def _has_slept_since(self, attempt: _Attempt) -> bool:
        """Whether the main thread has been in one wait in the kernel since before ``attempt``."""
        if attempt.asleep is None:
            return False
        self._main_is_out.wait(_ASLEEP_S)
        return kernel_wait(self._native_id) == attempt.asleep

    def _escalate(self, unblock: Callable[[FrameType], None], before: list[_Place]) -> None:
        now = self._stack()
        if now and [place.line for place in now] == [place.line for place in before]:
            unblock(now[-1].frame)
        elif log.isEnabledFor(logging.DEBUG):
            log.debug("%s", describe_suppression(before, now))

    def _stack(self) -> list[_Place]:
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return []
        return [_Place(caller, line) for caller, line in traceback.walk_stack(frame)][::-1]

    @contextlib.contextmanager
    def _raising_what_is_ignored(self) -> Iterator[None]:
        """Raise again what Python ignores, as soon as the main thread has left where that was.

        Python does so with what is raised in a ``__del__``, in the clean-up of a generator that is
        freed, and in callbacks from C. A function that is always there would never end.
        """
        before = sys.unraisablehook

        def raise_again(ignored: sys.UnraisableHookArgs) -> None:
            if not comes_from_restart(ignored.exc_value):
                before(ignored)
                return
            raised = map(set_async_exc, (self._thread_id,), (RankShouldRestart,))
            if self.armed:
                # Python raises it after the next call: hence none from here on, or it would be
                # ignored in here as well.
                (_,) = raised

        sys.unraisablehook = raise_again
        try:
            yield
        finally:
            if sys.unraisablehook is raise_again:
                sys.unraisablehook = before

    def _how_delicate(self) -> Delicate:
        frame = sys._current_frames().get(self._thread_id)
        return how_delicate(self._functions(frame), -1 if frame is None else frame.f_lasti)

    def _functions(self, frame: FrameType | None) -> Iterable[CodeType]:
        """What the main thread is in, from the innermost ``frame`` to what the loop has called."""
        while frame is not None and frame.f_code is not self._outermost:
            yield frame.f_code
            frame = frame.f_back

    def _is_busy_leaving(self, stack: list[_Place]) -> bool:
        """Whether the main thread is in ``settle``, or handles what we have raised."""
        own = {type(self).settle.__code__, type(self)._settle.__code__}
        if any(place.frame.f_code in own for place in stack):
            return True
        current = sys._current_exceptions().get(self._thread_id)
        error = current[1] if isinstance(current, tuple) else current  # 3.11: sys.exc_info()
        return isinstance(error, BaseException) and comes_from_restart(error)


class _Settled(BaseException):
    """Raised and caught in ``settle``."""


class _WakeUp:
    """Wakes one thread that waits; a wake-up that comes first is kept. One lock, no Python code
    that an asynchronous exception could leave half done."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def wait(self, timeout_s: float) -> None:
        self._lock.acquire(timeout=timeout_s)

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was woken already
            self._lock.release()


class _Gate:
    """Whether the main thread is in an ``atomic`` section, and whether it may still enter one.

    A new one for each iteration: what the exception of the last one has left locked or counted
    stays with the old one.
    """

    def __init__(self) -> None:
        self.closed = False
        self.left = _WakeUp()
        self._depth = 0
        self._lock = _thread.allocate_lock()

    @is_delicate  # holds a lock
    def enter(self) -> None:
        with self._lock:
            if self.closed and not self._depth:
                raise RankShouldRestart("a restart has begun: the atomic section is not entered")
            self._depth += 1

    @is_delicate  # holds a lock
    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
        self.left.wake()

    def close(self) -> bool:
        """Whether the main thread is in no section any more."""
        with self._lock:
            self.closed = True
            return not self._depth


class _Patience:
    """How long clean-up is waited for: ``longest_s`` in all, and shorter when it does not move."""

    def __init__(self, longest_s: float) -> None:
        self._moved_at = time.monotonic()
        self._ends_at = self._moved_at + longest_s
        self._brief_ends_at = self._moved_at + _BRIEFLY_S
        self._seen: list[tuple[int, int]] = []

    def lasts(self, stack: list[_Place], delicate: Delicate) -> bool:
        """Whether to wait on, after this look at the main thread's stack."""
        if delicate is Delicate.NO:
            return False
        now = time.monotonic()
        if delicate is Delicate.BRIEFLY:
            return now < min(self._ends_at, self._brief_ends_at)
        places = [(id(place.frame), place.instruction) for place in stack]
        if places != self._seen:
            self._seen, self._moved_at = places, now
        return now < min(self._ends_at, self._moved_at + _STILL_FOR_S)


class _Attempt(NamedTuple):
    """Where the main thread was when an exception was raised in it."""

    asleep: str | None  # see ``kernel_wait``
    stack: list[_Place]


class _Place:
    """A frame, and the line and instruction it was at when it was looked at."""

    def __init__(self, frame: FrameType, line: int) -> None:
        self.frame = frame
        self.line = line
        self.instruction = frame.f_lasti

    def __str__(self) -> str:
        code = self.frame.f_code
        return f"{code.co_filename}:{self.line} in {code.co_qualname}"


def describe_suppression(before: list[_Place], after: list[_Place]) -> str:
    """Where the exception was most likely swallowed, from two looks at the main thread's stack.

    The innermost frame that was there both times is the one that went on.
    """
    common = [b for a, b in zip(before, after, strict=False) if a.frame is b.frame]
    where = str(common[-1]) if common else "an unknown place"
    at = str(after[-1]) if after else "an unknown place"
    return (
        f"RankShouldRestart was suppressed or has not arrived yet: the function went on in {where}"
        f" (now at {at}); a handler of BaseException has to raise it again"
    )


def _send(thread_id: int, number: int | None) -> None:
    if number is None:
        return
    with contextlib.suppress(ProcessLookupError, OSError):
        signal.pthread_kill(thread_id, number)


def wake_signal() -> int | None:
    """A real-time signal that is free, with a handler that does nothing.

    Delivering it makes a system call return early, whereupon Python looks for pending exceptions.
    The handler stays for the life of the process: a signal that is still under way when the
    default action is back would end it. ``None`` outside the main thread, where handlers cannot
    be set, and when no signal is free.
    """
    global _wake_number
    if threading.current_thread() is not threading.main_thread():
        return None
    if _wake_number is None:
        free = (n for n in range(signal.SIGRTMIN + 5, signal.SIGRTMAX) if _is_unused(n))
        _wake_number = next(free, None)
        if _wake_number is not None:
            signal.signal(_wake_number, _do_nothing)
    return _wake_number


_wake_number: int | None = None


def _is_unused(number: int) -> bool:
    """Python knows of the handlers that were set from Python; the kernel of those set in C."""
    masks = [line for line in _STATUS.read_text().splitlines() if line.startswith(_USED)]
    used = any(int(mask.split()[1], 16) >> (number - 1) & 1 for mask in masks)
    return not used and signal.getsignal(number) == signal.SIG_DFL


_USED = ("SigCgt:", "SigIgn:")


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Nothing to do: that the signal arrives is what ends the system call."""
