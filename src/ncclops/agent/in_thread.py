"""What may take long or hang, beside the event loop; unlike ``asyncio.to_thread``, with a limit.

A thread of asyncio's pool that hangs keeps the loop from ending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Generic, TypeVar

from ncclops.agent.condition import Condition
from ncclops.record.answer import Answer

T = TypeVar("T")


class InThread(Generic[T]):
    """``function`` in a thread, from now on; ``condition`` is notified when it has ended."""

    def __init__(self, function: Callable[[], T], condition: Condition) -> None:
        self._loop, self._condition = asyncio.get_running_loop(), condition
        self.is_done = False
        self._answer = Answer(function, then=self._wake)

    def get(self) -> T:
        """What ``function`` has returned. Raises what it has raised, ``TimeoutError`` before."""
        return self._answer.get(0)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        self.is_done = True
        self._condition.notify()


async def in_thread(function: Callable[[], T], limit_s: float) -> T:
    """What ``function`` returns. Raises what it raises, ``TimeoutError`` after ``limit_s``."""
    condition = Condition()
    thread = InThread(function, condition)
    await condition.until(lambda: thread.is_done, timedelta(seconds=limit_s))
    return thread.get()
