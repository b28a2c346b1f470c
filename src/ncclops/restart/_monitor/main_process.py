"""The main process of a rank, as its monitor process sees it. Standard library only."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Of a process that is ending, in Linux's include/linux/sched.h: its threads end one by one.
_PF_EXITING = 0x4


class MainProcess:
    """The main process, by its pidfd; where that was refused, as the parent of this process."""

    def __init__(self, pid: int, pidfd: int | None) -> None:
        self.pidfd = pidfd
        self._pid = pid
        self._has_had_threads = False

    def has_ended_unannounced(self) -> bool:
        """Whether it is gone, where no pidfd says so. A process has another parent then."""
        return self.pidfd is None and os.getppid() != self._pid

    def signal(self, number: signal.Signals) -> None:
        """Raises ``ProcessLookupError`` when it is gone: its number may be another's by now."""
        if self.pidfd is not None:
            signal.pidfd_send_signal(self.pidfd, number)
        elif os.getppid() == self._pid:
            os.kill(self._pid, number)
        else:
            raise ProcessLookupError

    def is_killed(self) -> bool:
        """Whether SIGKILL has been sent to it, by whomever, and the kernel still has it."""
        try:
            status = Path("/proc", str(self._pid), "status").read_text()
        except OSError:
            return False
        pending = status.partition("ShdPnd:")[2].split(maxsplit=1)
        return bool(pending) and bool(int(pending[0], 16) >> (signal.SIGKILL - 1) & 1)

    def runs_another_program(self) -> bool:
        """Whether it has called exec: of its threads, which feed the link, one alone is left."""
        proc = Path("/proc", str(self._pid))
        try:
            has_threads = sum(1 for _ in (proc / "task").iterdir()) > 1
            flags = int((proc / "stat").read_text().rpartition(")")[2].split()[6])
        except OSError:
            return False
        self._has_had_threads |= has_threads
        return self._has_had_threads and not has_threads and not flags & _PF_EXITING
