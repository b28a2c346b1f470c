"""The signals that reach the agent, and what they ask for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from ncclops.launch.changes import Changes
from ncclops.launch.warden import FORWARDED

_STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


class StopSignals:
    """Counts the signals that ask the run to stop, and passes the others on.

    ``changes`` are told of each of them. ``on_first`` is called with the first, ``pass_on`` with
    SIGUSR1 and SIGUSR2, which are between the operator and the script.
    """

    def __init__(
        self,
        changes: Changes,
        *,
        on_first: Callable[[signal.Signals], None],
        pass_on: Callable[[signal.Signals], None],
    ) -> None:
        self.first: signal.Signals | None = None
        self.count = 0
        self.launcher_lost = False
        self._changes = changes
        self._on_first = on_first
        self._pass_on = pass_on
        self._warden_pid = os.getppid()

    @property
    def hurry(self) -> bool:
        """Whether we were asked more than once, and shall not wait for anything."""
        return self.count > 1

    @property
    def is_orphan(self) -> bool:
        """Whether the warden, our parent, has gone."""
        return os.getppid() != self._warden_pid

    def take(self, on_child_end: Callable[[], None]) -> None:
        """Receive signals from now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        for signum in FORWARDED:
            # SIGTERM also when it is ignored: it is how we learn that the warden has gone.
            if signum is signal.SIGTERM or signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)
        loop.add_signal_handler(signal.SIGCHLD, on_child_end)
        # The warden blocked them before it forked us, so that none could be lost until now.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum not in _STOPPING:
            self._pass_on(signum)
            return
        self.count += 1
        self.launcher_lost = self.launcher_lost or self.is_orphan
        if self.first is None:
            self.first = signum
            self._on_first(signum)
        self._changes.tell()
