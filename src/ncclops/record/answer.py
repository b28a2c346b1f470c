"""File systems may hang: what is asked of one is asked in a thread that is not waited for for ever.

Such a thread is a daemon's, as nothing ends it before the file system answers.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")

_TOLD_WITHIN_S = 1.0


class Answer(Generic[T]):
    """What ``function`` returns or raises, in a thread of its own.

    ``then`` is called there when it is known. Without a thread to be had it is done here and now.
    """

    def __init__(self, function: Callable[[], T], then: Callable[[], None] = lambda: None) -> None:
        self._function, self._then = function, then
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._known = threading.Event()
        thread = threading.Thread(target=self._run, name="ncclops-files", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # as many threads as are allowed
            self._run()

    def get(self, limit_s: float) -> T:
        """The result. Raises what ``function`` has raised, ``TimeoutError`` where it is late."""
        if not self._known.wait(limit_s):
            raise TimeoutError(errno.ETIMEDOUT, "the file system does not answer")
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            self._error = error
        self._known.set()
        self._then()


def within(limit_s: float, function: Callable[[], T]) -> T:
    """What ``function`` returns, if it does in time; see :meth:`Answer.get`."""
    return Answer(function).get(limit_s)


def tell(lines: str) -> None:
    """Write lines on stderr, which may take nothing for ever: a pipe that nobody reads is full.

    Past Python's buffer: who waits in it holds a lock, and no other thread could leave.
    """
    try:
        fd = sys.stderr.fileno()
    except (AttributeError, OSError):  # a notebook's, or none
        with suppress(AttributeError, OSError):
            sys.stderr.write(lines)
        return
    with suppress(OSError):  # it has gone, or is full
        within(_TOLD_WITHIN_S, partial(os.write, fd, lines.encode(errors="backslashreplace")))


class Descriptors:
    """Descriptors put by, so that what has to be written at the end can be opened."""

    def __init__(self, count: int) -> None:
        self._kept = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count)]

    def give(self) -> None:
        """Free them."""
        while self._kept:
            os.close(self._kept.pop())
