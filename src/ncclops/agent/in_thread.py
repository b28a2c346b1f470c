"""What may take long or hang, beside the event loop; unlike ``asyncio.to_thread``, with a limit.

A thread of asyncio's pool that hangs keeps the loop from ending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ncclops.record.answer import Answer

T = TypeVar("T")


async def in_thread(function: Callable[[], T], limit_s: float) -> T:
    """What ``function`` returns. Raises what it raises, ``TimeoutError`` after ``limit_s``."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(done.set)

    answer = Answer(function, then=wake)
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await done.wait()
    return answer.get(0)
