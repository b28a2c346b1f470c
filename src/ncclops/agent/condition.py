"""How the phases of the agent wait: until a condition holds, checked after each notification."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta


class Condition:
    """Wakes all that wait in the event loop; each checks its condition again."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Something has happened: a worker ended, a signal or a request came. In the loop only."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, condition: Callable[[], object], limit: timedelta | None = None) -> bool:
        """Wait until ``condition`` holds, or for ``limit``; whether it holds.

        It is looked at after each :meth:`notify`, and once at the beginning.
        """
        seconds = None if limit is None else limit.total_seconds()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._next.wait()
        return bool(condition())
