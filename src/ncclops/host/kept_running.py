"""Server processes that are told to go on where somebody stops them alone (SIGSTOP).

Whatever needs such a process waits for it, each for its own timeout, or takes this node for lost.
Who stops the whole job, as Slurm does to suspend it, stops the process that looks as well, which
then does not look.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Protocol

log = logging.getLogger(__name__)


class Child(Protocol):
    """A child of this process, as ``subprocess.Popen``."""

    @property
    def pid(self) -> int:
        """Its number."""

    def send_signal(self, signum: signal.Signals, /) -> None:
        """Send ``signum``, unless the child has ended."""


class KeptRunning:
    """Sends ``child`` SIGCONT when it is found stopped for ``PAUSE_S``, until :meth:`end`.

    ``what`` names it in the log. In the event loop.
    """

    PAUSE_S = 3.0

    def __init__(self, child: Child, what: str) -> None:
        self._child, self._what = child, what
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(self.PAUSE_S, self._look, False)

    def end(self) -> None:
        """Look no more."""
        self._next.cancel()

    def _look(self, was_stopped: bool) -> None:
        is_stopped = self._is_stopped()
        if is_stopped and was_stopped:
            log.warning("%s (pid %d) was stopped: SIGCONT", self._what, self._child.pid)
            self._child.send_signal(signal.SIGCONT)
        again = is_stopped and not was_stopped
        self._next = self._loop.call_later(self.PAUSE_S, self._look, again)

    def _is_stopped(self) -> bool:
        try:  # leaves the state as it is, to be asked for again
            how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._child.pid, how) is not None
        except ChildProcessError:  # it has ended, and that was seen
            return False
