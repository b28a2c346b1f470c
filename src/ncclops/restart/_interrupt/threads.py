"""What can be done to other threads of this process, and what the kernel tells of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import threading
from pathlib import Path
from typing import NamedTuple

# Prototypes of our own: ``argtypes`` set on ``ctypes.pythonapi`` would hold for all its users.
set_async_exc = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)
# The same function, for clearing what is pending: py_object cannot be NULL.
clear_async_exc = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)

# It is counted when a wait begins: the number of one is not 0.
_ASLEEP = re.compile(
    r"^State:\tS.*^voluntary_ctxt_switches:\t([1-9]\d*)$", re.DOTALL | re.MULTILINE
)

_TASKS = Path("/proc/self/task")
# The number of futex, in which a thread waits for another one; its fourth argument leads to the
# time limit, and the last but one word is the thread's stack pointer.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())


def kernel_wait(native_id: int | None) -> str | None:
    """Which of its waits in the kernel the thread is in, by their number.

    ``None``: in none that a signal would end, or this kernel does not count them.
    """
    found = _ASLEEP.search(_read(native_id, "status"))
    return found[1] if found else None


def main_thread_wait() -> int:
    """The same of the main thread, as a number; 0: in none. Any thread."""
    # Its number is the process's, which ``threading`` does not know of a forked one.
    return int(kernel_wait(os.getpid()) or 0)


def is_running(native_id: int | None) -> bool:
    """Whether the thread is on a core, or waits for one."""
    return "\nState:\tR" in _read(native_id, "status")


def system_call(native_id: int | None) -> int | None:
    """The number of the system call that the thread is in. ``None``: in none, or it is not told."""
    words = system_call_words(native_id)
    return words[0] if words else None


def system_call_words(native_id: int | None) -> list[int]:
    """The system call that the thread is in: its number, its six arguments, and the thread's stack
    pointer and place in the program. Empty: in none, or it is not told."""
    words = _read(native_id, "syscall").split()
    if not words or not words[0].isdecimal():
        return []
    return [int(words[0]), *(int(word, 16) for word in words[1:])]


def system_calls_are_told() -> bool:
    """Not by kernels that are built without, nor of a process that has given up its user id: its
    entries in ``/proc`` belong to root from then on."""
    return _read(threading.get_native_id(), "syscall") != ""


class Wait(NamedTuple):
    """A wait for another thread: ``place`` tells it from another one, if that is of another call;
    ``is_limited``: it has a time limit."""

    place: str
    is_limited: bool


def wait_for_thread(native_id: int | None) -> Wait | None:
    """The wait for another thread that the thread is in. ``None``: in none, or it is not told."""
    words = system_call_words(native_id)
    if len(words) < 9 or words[0] != _FUTEX:
        return None
    return Wait(f"{words[1]:#x} {words[7]:#x}", words[4] != 0)


def names_of_threads() -> dict[int, str]:
    """The names of this process's threads, by their native identities."""
    names = {}
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names[int(task.name)] = (task / "comm").read_text().rstrip("\n")
    return names


def _read(native_id: int | None, name: str) -> str:
    try:
        return Path(f"/proc/self/task/{native_id}/{name}").read_text()
    except OSError:  # the thread has ended, or the kernel is built without
        return ""
