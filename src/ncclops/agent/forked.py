"""A child that the fork server has started, and not ``subprocess``."""

from __future__ import annotations

import os
import signal


class ForkedProcess:
    """With the methods of ``Popen`` that are used of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self) -> int:
        """How it ended, as ``Popen.wait``."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def send_signal(self, signum: signal.Signals) -> None:
        """Send ``signum``; never to another process: nobody but ``wait`` frees the number."""
        if self._code is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)
