"""Whether the agent's event loop turns: a file system or a driver that hangs can hold it for ever.

Then it takes no signal and does not see that the supervisor has died. While training goes on, that
is waited for; once the run is to end, it is not.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import threading
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the supervisor needs no event loop
    import asyncio

_BEAT_EVERY_S = 1.0
_FORMAT = struct.Struct("d")
_FORWARDED = struct.Struct("Q")  # behind it
# More than the agent itself ever takes for one thing: to end what workers leave behind, 15 s.
SILENT = timedelta(seconds=20)


class Pulse:
    """A time that the agent renews while its event loop turns, and what the supervisor counts.

    Made in the supervisor, before it forks the agent.
    """

    def __init__(self, silent: timedelta = SILENT) -> None:
        self.silent = silent
        self._supervisor_pid = os.getpid()
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._note()

    def is_silent(self, since: float) -> bool:
        """Whether the loop has not turned for ``silent`` after ``since``, a monotonic time: before
        that, the process may have been stopped."""
        (last,) = _FORMAT.unpack_from(self._page)
        return bool(time.monotonic() - max(last, since) > self.silent.total_seconds())

    @property
    def forwarded(self) -> int:
        """How many signals that ask for the end the supervisor has passed on, or is about to."""
        (number,) = _FORWARDED.unpack_from(self._page, _FORMAT.size)
        return int(number)

    def count_forwarded(self) -> None:
        """Call in the supervisor, before it passes on such a signal."""
        _FORWARDED.pack_into(self._page, _FORMAT.size, self.forwarded + 1)

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Show from now on that ``loop`` turns; call in it, in the agent.

        Once the supervisor has gone and the loop does not turn, this process ends: the kernel ends
        the workers then, and the servers end with the agent. Raises ``OSError``, or
        ``RuntimeError`` without a thread to be had.
        """
        try:
            supervisor = os.pidfd_open(self._supervisor_pid)
        except ProcessLookupError:  # the kernel's SIGTERM is on its way
            supervisor = os.eventfd(1)
        watch = partial(self._end_without, supervisor)
        threading.Thread(target=watch, name="ncclops-orphan", daemon=True).start()
        self._beat(loop)

    def _end_without(self, supervisor: int) -> None:
        select.select([supervisor], [], [])
        lost_at = time.monotonic()
        while not self.is_silent(lost_at):
            time.sleep(_BEAT_EVERY_S)
        os._exit(1)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._note()
        loop.call_later(_BEAT_EVERY_S, self._beat, loop)

    def _note(self) -> None:
        _FORMAT.pack_into(self._page, 0, time.monotonic())
