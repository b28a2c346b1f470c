"""Python stacks of a process in which no Python code can run. Standard library only.

The snapshot server in the process has registered faulthandler's C-level dump on a real-time
signal, with a memory file opened ahead. The signal goes to the server's own thread, which only
waits for requests: the system calls of the training threads are not interrupted.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ncclops.host import process_view

# Stacks of a thousand deep threads are smaller.
_MOST_BYTES = 4 << 20
_LOOK_EVERY_S = 0.002
STACKS_NAME = "ncclops-stacks"  # of the memory file


@dataclass(frozen=True)
class StackDumper:
    """How a process dumps its stacks: the server's thread, the signal, the memory file.

    ``main_thread`` is the main thread's identity as faulthandler prints it.
    """

    pid: int
    tid: int
    signal: int
    stacks_fd: int
    main_thread: int

    @property
    def is_set(self) -> bool:
        return bool(self.tid and self.signal)


def dump_stacks(dumper: StackDumper, limit_s: float) -> str | None:
    """The stacks of all Python threads; None if the process does not take the signal in time.

    Nothing happens to a process that has not (or no longer) registered the signal: it would
    otherwise be ended by it. Neither to one without our memory file: what is recorded may be
    damaged, and the number another process's by now.
    """
    if not dumper.is_set or not signal.SIGRTMIN < dumper.signal < signal.SIGRTMAX:
        return None
    if not any(process_view.signal_sets(dumper.pid, dumper.tid)):
        # The interpreter is ending, and its threads have gone but for the main one.
        dumper = replace(dumper, tid=dumper.pid)
    if not process_view.signal_sets(dumper.pid, dumper.tid)[2] & 1 << (dumper.signal - 1):
        return None
    try:
        fd = os.open(f"/proc/{dumper.pid}/fd/{dumper.stacks_fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not Path(f"/proc/self/fd/{fd}").readlink().match(f"/memfd:{STACKS_NAME}*"):
            return None
        start = os.fstat(fd).st_size
        if start > _MOST_BYTES:
            os.ftruncate(fd, 0)  # the process appends, wherever the end is
            start = 0
        if not _send(dumper) or not _wait_for_end(dumper, fd, start, limit_s):
            return None
        text = os.pread(fd, _MOST_BYTES, start).decode(errors="replace")
    except OSError:
        return None
    finally:
        os.close(fd)
    return _with_main_named(text, dumper.main_thread) or None


def _send(dumper: StackDumper) -> bool:
    import ctypes  # heavy for the monitor process, which rarely comes here

    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "tgkill"):  # glibc 2.30
        return bool(libc.tgkill(dumper.pid, dumper.tid, dumper.signal) == 0)
    number = {"x86_64": 234, "aarch64": 131}.get(os.uname().machine)
    if number is None:
        return False
    return bool(libc.syscall(number, dumper.pid, dumper.tid, dumper.signal) == 0)


def _wait_for_end(dumper: StackDumper, fd: int, start: int, limit_s: float) -> bool:
    """Until the handler has run: it has written, and its signal is no longer blocked, as inside.

    In this order: what is blocked says nothing as long as the handler has not begun.
    """
    bit = 1 << (dumper.signal - 1)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        has_begun = os.fstat(fd).st_size > start
        _, blocked, caught = process_view.signal_sets(dumper.pid, dumper.tid)
        if has_begun and caught and not blocked & bit:
            return True
        # The end of a signal handler in another process raises no event here.
        time.sleep(_LOOK_EVERY_S)
    return False


def _with_main_named(text: str, main_thread: int) -> str:
    """Name the main thread as our own dumps do; else only faulthandler's order shows it."""
    lines = []
    for line in text.splitlines():
        is_header = line.startswith(("Thread 0x", "Current thread 0x"))
        if is_header and "[" not in line and int(line.split("0x")[1].split()[0], 16) == main_thread:
            line = line.replace(" (", " [MainThread] (", 1)  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines) + "\n" if lines else ""
