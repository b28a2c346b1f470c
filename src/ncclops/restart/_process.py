"""What this process holds: memory, sockets, garbage; and whether a plain ``fork`` may copy it.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# An interpreter with torch and little else has 0.1 to 0.3 GiB of memory of its own. Below this a
# fork takes milliseconds (page tables) and garbage that is never collected does not matter.
_SMALL_BYTES = 1 << 30
_PR_SET_NAME = 15
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


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
    """Call ``run`` in a process that outlives this one, as a child of init; see ``fork_is_safe``.

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


def duplicate_socket(fd: int) -> socket.socket | None:
    """A handle of our own on the socket ``fd``; ``None`` when it is no socket, or closed by now.

    It keeps referring to the same socket even if the number is reused meanwhile. The socket is as
    it was: a plain handle, after ``socket.setdefaulttimeout``, would make it non-blocking, for its
    owner as well. Reads of the handle do not wait, as Python takes it for non-blocking.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        handle = socket.socket(fileno=copy, type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        kind = handle.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        return socket.socket(fileno=handle.detach(), type=kind | socket.SOCK_NONBLOCK)
    except OSError:
        os.close(copy)
        return None


# The kernel asks the other end of an idle connection after 10 s, and gives it up after 15 s more.
_KEEPALIVE_AFTER_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 10, 5, 3
# What was sent and is not acknowledged by then is lost, and the connection with it.
_ACKNOWLEDGED_WITHIN_MS = 20_000


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel find out within half a minute when the other end of ``sock`` is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _ACKNOWLEDGED_WITHIN_MS)


def set_deadlines(sock: socket.socket, answer_s: float) -> None:
    """Have the kernel notice that the other end is gone, and end a call without an answer.

    torch waits for keys in ``poll``, which has a deadline of its own; all else it reads at once.
    """
    timeval = struct.pack("ll", int(answer_s), int(answer_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, timeval)
    keep_alive(sock)


# What a terminal and schedulers send to all processes of a job, for its ranks to end, or to write
# a checkpoint (Slurm's --signal, and what sbatch and scancel do with it).
SENT_TO_ALL = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def ignore_what_is_sent_to_all() -> None:
    """For a process that serves ranks and ends with them: the ranks still use it meanwhile."""
    for number in SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)


_is_frozen = False
# How the note begins that has the traceback of a released exception.
TRACEBACK_NOTE = "Traceback of the earlier iteration"


def freeze_heap() -> None:
    """Exempt all that exists before the first iteration from garbage collection.

    A full collection over what torch has loaded takes tens of milliseconds, and each restart
    needs one, to release what the abandoned iteration holds. What was frozen is not looked at.

    Garbage that is frozen is never collected. A process that may hold much is therefore collected
    completely before; in a small one only what is young, so that the start costs nothing.
    """
    global _is_frozen
    if not _is_frozen:
        _is_frozen = True
        gc.collect(2 if holds_much() else 1)
        gc.freeze()


def release(errors: Iterable[BaseException]) -> None:
    """Release what the abandoned iteration's frames hold: activations, optimizers, groups.

    ``errors`` stay, with their tracebacks as text, in a note. The frames themselves cannot stay: a
    frame keeps its function, and a function within a function keeps the variables of both.
    """
    for error in errors:
        if (trace := error.__traceback__) is None:
            continue
        text = "".join(traceback.format_tb(_from_the_function_on(trace)))
        with contextlib.suppress(Exception):  # an exception that cannot be changed
            error.add_note(f"{TRACEBACK_NOTE} (most recent call last):\n{text}")
        for frame, _ in traceback.walk_tb(trace):
            with contextlib.suppress(RuntimeError):  # still running: the loop's own
                frame.clear()
                # Up to Python 3.12 a look at them has left a copy in the frame, which this renews.
                _ = frame.f_locals
        object.__setattr__(error, "__traceback__", None)  # also of a frozen dataclass
    gc.collect()


def _from_the_function_on(trace: TracebackType) -> TracebackType:
    """``trace`` without the frames of this package that lead to the wrapped function."""
    entry: TracebackType | None = trace
    while entry is not None and entry.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        entry = entry.tb_next
    return entry or trace
