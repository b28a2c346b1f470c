"""A seccomp filter that refuses pidfds, as those of older container runtimes do.

Run as a program it prints whether the filter holds here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
# linux/bpf_common.h: load a word, jump if equal, return.
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# The same on all architectures.
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_pidfds() -> None:
    """For the calling thread and what it starts. Raises ``OSError`` where that is not allowed."""
    instructions = b"".join(
        struct.pack("=HBBI", *each)
        for each in (
            (_LOAD, 0, 0, 0),  # the number of the system call
            (_JUMP_EQUAL, 2, 0, _PIDFD_OPEN),
            (_JUMP_EQUAL, 1, 0, _PIDFD_SEND_SIGNAL),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        )
    )
    program = _Program(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "no seccomp filter can be set")


if __name__ == "__main__":
    refuse_pidfds()
    try:
        os.pidfd_open(os.getpid())
    except PermissionError:
        print("refused")
