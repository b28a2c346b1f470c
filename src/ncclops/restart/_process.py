"""What this process holds, and whether it may be copied with a plain ``fork``."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# An interpreter with torch and little else has 0.1 to 0.3 GiB of memory of its own. Below this a
# fork takes milliseconds (page tables) and garbage that is never collected does not matter.
_SMALL_BYTES = 1 << 30
_PR_SET_NAME = 15


def holds_much() -> bool:
    """Whether there may be something large here: a CUDA context, or over 1 GiB of own memory."""
    torch: Any = sys.modules.get("torch")
    return (torch is not None and torch.cuda.is_initialized()) or _own_bytes() > _SMALL_BYTES


def fork_is_safe() -> bool:
    """Whether a child made by ``fork`` is a whole process.

    A fork copies the calling thread alone, and whatever lock another one holds stays locked in
    the child: hence only from a process with a single thread. A CUDA context cannot be copied;
    much memory would be kept alive by the child, and takes long.
    """
    return len(list(Path("/proc/self/task").iterdir())) == 1 and not holds_much()


def fork_detached(name: str, run: Callable[[], object], *, keep: int, log: str) -> int:
    """Call ``run`` in a process that outlives this one and is nobody's child; see ``fork_is_safe``.

    Returns a child to wait for, which ends at once. The process has its own session and none of
    our descriptors but ``keep``; its output goes to the file ``log``, and it shows as ``name``.
    """
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        if os.fork() == 0:
            _become(name, keep, log)
            run()
    finally:
        _end()


def _become(name: str, keep: int, log: str) -> None:
    gc.disable()  # what we inherited is not ours to finalize
    signal.set_wakeup_fd(-1)
    sys.excepthook = sys.__excepthook__
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _end() -> NoReturn:
    """Go without running the exit handlers and finalizers that we have inherited."""
    error = sys.exc_info()[1]
    if error is not None:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(error is not None)


def _own_bytes() -> int:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
