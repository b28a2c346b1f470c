"""The stacks of a process that nothing in Python can look at any more. Standard library only.

A signal makes ``faulthandler``'s handler, which is C code and needs no GIL, write the Python stacks
of all threads into memory that the guardian shares. The guardian asks for them when it is about
to end the process: a handler that looks at other threads without the GIL is not for healthy ones.
"""

from __future__ import annotations

import fcntl
import functools
import os
import signal
from typing import NamedTuple

# As much as a fault in the store may carry. The thread that the kernel hands the signal to, as a
# rule the main thread, is reported last, and it is the one that matters.
_MOST_BYTES = 8000


class StackDump(NamedTuple):
    """Where a process writes its stacks, and the signal that makes it do so."""

    fd: int
    signal: int

    def clear(self) -> None:
        """Forget what has been written."""
        os.ftruncate(self.fd, 0)

    def read(self) -> str | None:
        """What the process has written; ``None``: nothing, so far."""
        size = os.fstat(self.fd).st_size
        text = os.pread(self.fd, _MOST_BYTES, max(0, size - _MOST_BYTES))
        return text.decode(errors="replace") or None


@functools.cache
def prepare() -> StackDump:
    """This process's, made ready once and for good: a signal may be late."""
    import faulthandler  # not in the guardian

    fd = os.memfd_create("ncclops-stacks", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    # From the end that _interrupt.wake_signal does not search from.
    number = next(n for n in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if not _is_used(n))
    faulthandler.register(number, fd, all_threads=True, chain=False)
    return StackDump(fd, number)


def _is_used(number: int) -> bool:
    """Whether this process handles or ignores the signal, in Python or in C."""
    masks = [line for line in _lines("/proc/self/status") if line.startswith(("SigCgt", "SigIgn"))]
    return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in masks)


def is_stopped(pidfd: int) -> bool:
    """Whether the process is stopped, by a signal or a debugger; false when it is gone."""
    try:
        fields = dict(line.split(":", 1) for line in _lines(f"/proc/self/fdinfo/{pidfd}"))
        state = _lines(f"/proc/{int(fields['Pid'])}/stat")[0].rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


def _lines(path: str) -> list[str]:
    with open(path) as file:  # noqa: PTH123 - pathlib would slow down the guardian's start
        return file.read().splitlines()
