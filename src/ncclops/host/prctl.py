"""What only the Linux kernel can do for a process tree, and a name in it, through ``prctl(2)``."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt orphaned descendants from now on. Raises ``OSError`` where the kernel refuses."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, signum: signal.Signals) -> None:
    """Ask the kernel for ``signum`` when the parent ends; sends it now if it already has.

    The signal fires when the *thread* that spawned this process ends, so spawn from a thread
    that lives as long as the process.
    """
    signal_at_parent_s_end(signum)
    # It may have ended before the call above could notice. With an interpreter that is a wrapper
    # script, the parent is that wrapper, and ``parent_pid`` is further up and alive.
    if os.getppid() != parent_pid and not _is_alive(parent_pid):
        os.kill(os.getpid(), signum)


def signal_at_parent_s_end(signum: signal.Signals | None) -> None:
    """Ask the kernel for ``signum`` when the parent ends from now on; None: for no signal more."""
    _prctl(_PR_SET_PDEATHSIG, 0 if signum is None else signum)


def show_as(name: str) -> None:
    """Have ``ps -o comm`` and ``top`` show this process as ``name``, of 15 bytes at most."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
