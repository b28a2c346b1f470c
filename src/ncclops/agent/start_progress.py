"""The line at the bottom of a terminal that says what a job without steps is doing."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

from ncclops.agent.job import Job
from ncclops.agent.start_line import StartLine
from ncclops.agent.terminal import Terminal
from ncclops.host import process_view
from ncclops.record.events import Event

# It says for how long, in seconds.
_EVERY_S = 1.0


class StartProgress:
    """Shows it on ``terminal``, for a person who sits there and has not asked for silence.

    Not where the launcher is in the background: a shell, or an editor, has the terminal. To be made
    in the event loop.
    """

    def __init__(self, job: Job, terminal: Terminal) -> None:
        self._terminal, self._line = terminal, StartLine()
        self._loop = asyncio.get_running_loop()
        self._launcher = os.getppid()
        self._timer: asyncio.TimerHandle | None = None
        self._wanted = (
            not job.quiet
            and job.attached is None  # its prompt stands there
            and sys.stderr.isatty()
            and os.environ.get("TERM") not in (None, "", "dumb")
        )
        if self._wanted:
            job.run.listen(self._post)
            self._line.start(self._loop.time())
            self._arm()

    def meet(self, said: str) -> None:
        """The nodes meet: who is there, and who is missing."""
        if self._wanted:
            self._line.meet(said, self._loop.time())
            self._arm()

    def close(self) -> None:
        """The run is over."""
        self._wanted = False
        if self._timer is not None:
            self._timer.cancel()
        self._terminal.progress(None)

    def _post(self, event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: Event) -> None:
        if self._wanted:
            self._line.take(event, self._loop.time())
            self._arm()
            if not self._line.is_waiting:
                self._terminal.progress(None)

    def _arm(self) -> None:
        if self._timer is None and self._line.is_waiting:
            self._timer = self._loop.call_later(_EVERY_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        text = self._line.text(self._loop.time())
        if text is not None and not process_view.is_in_foreground(self._launcher):
            text = None
        self._terminal.progress(text)
        self._arm()
