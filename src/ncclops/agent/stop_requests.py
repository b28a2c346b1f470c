"""Requests to stop the run: the signals that reach the agent, and `ncclops stop`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

from ncclops.agent.condition import Condition
from ncclops.agent.supervisor import FORWARDED, Repeats
from ncclops.decision.outcome import StopRequest

_STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


class StopRequests:
    """Collects the requests to stop, and passes other signals on.

    ``condition`` is notified of each of them. ``on_request`` is called with each, ``pass_on`` with
    SIGUSR1 and SIGUSR2, which are meant for the script; ``hold_screen`` with whether the terminal
    is the shell's at the moment. ``forwarded`` says how many signals the supervisor has passed on.

    A signal that goes to all processes of a job, as from systemd, a batch system or ``pkill -f``,
    comes here twice, once through the supervisor: that is one request. So is one that is sent
    twice at once (the supervisor passes on the first of them).
    """

    def __init__(
        self,
        condition: Condition,
        grace: timedelta,
        *,
        on_request: Callable[[StopRequest], None],
        pass_on: Callable[[signal.Signals], None],
        hold_screen: Callable[[bool], None] = lambda _: None,
        forwarded: Callable[[], int] = lambda: 0,
    ) -> None:
        self.first: StopRequest | None = None
        self.signals = 0
        self.launcher_lost = False
        self.deadline = float("inf")  # of the least patient request, in monotonic seconds
        self._grace = grace
        self._condition = condition
        self._on_request = on_request
        self._pass_on = pass_on
        self._hold_screen = hold_screen
        self._forwarded = forwarded
        self._from_supervisor = self._from_others = 0
        self._repeats = Repeats()  # among those of others
        self._supervisor_pid = os.getppid()

    @property
    def asked(self) -> bool:
        return self.first is not None

    @property
    def hurry(self) -> bool:
        """Whether a signal came more than once: then nothing is waited for."""
        return self.signals > 1

    @property
    def is_orphan(self) -> bool:
        """Whether the supervisor, our parent, has gone."""
        return os.getppid() != self._supervisor_pid

    def take(self, on_child_end: Callable[[], None]) -> None:
        """Receive signals from now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        for signum in FORWARDED:
            # SIGTERM also when it is ignored: the kernel sends it when the supervisor has died.
            if signum is signal.SIGTERM or signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)
        loop.add_signal_handler(signal.SIGCHLD, on_child_end)
        # The supervisor has been stopped by Ctrl-Z, and goes on.
        loop.add_signal_handler(signal.SIGTSTP, self._hold_screen, True)
        loop.add_signal_handler(signal.SIGCONT, self._hold_screen, False)
        # The supervisor blocked them before it forked us, so that none could be lost until now.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def add(self, request: StopRequest) -> None:
        """The run is asked to stop; a later request can only shorten the time for it."""
        self.first = self.first or request
        self.deadline = min(self.deadline, time.monotonic() + request.grace.total_seconds())
        self._on_request(request)
        self._condition.notify()

    def expect(self, grace: timedelta) -> None:
        """Another node was asked: the workers have so long here, too."""
        self.deadline = min(self.deadline, time.monotonic() + grace.total_seconds())

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum not in _STOPPING:
            self._pass_on(signum)
            return
        if (forwarded := self._forwarded()) > self._from_supervisor:
            self._from_supervisor = forwarded
        elif not self._repeats.has_one():
            self._from_others += 1
        self.launcher_lost = self.launcher_lost or self.is_orphan
        before, both = self.signals, (self._from_supervisor, self._from_others)
        # Of a supervisor that has gone nothing comes twice.
        self.signals = sum(both) if self.launcher_lost else max(both)
        if self.signals == before:
            return
        self.add(StopRequest(reason=signum.name, grace=self._grace, signum=signum))
