"""What a machine, a container or a limit has run out of, or a disk has failed in: in words, and
what to do about it."""

from __future__ import annotations

import errno
import os
import resource


def advice(error: BaseException) -> str | None:
    """What is exhausted, or has failed, where ``error`` came up, and what to do; None where nothing
    is."""
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return _processes()  # of the kernel's reasons Python says only this
    if not isinstance(error, OSError):
        return None
    match error.errno:
        case errno.EMFILE:
            return f"open files are limited to {_limit(resource.RLIMIT_NOFILE)}: raise `ulimit -n`"
        case errno.ENFILE:
            return "the machine has no more open files to give: raise the sysctl fs.file-max"
        case errno.EAGAIN:
            return _processes()
        case errno.ENOMEM:
            return _MEMORY
        case errno.ENOSPC:
            return "no space, or no inodes: `df -h` and `df -i` show which; make room there"
        case errno.EDQUOT:
            return "the quota is used up: make room, or have it raised"
        case errno.EROFS:
            return "the file system has become read-only: `dmesg` or its server says why"
        case errno.EFBIG if error.strerror == os.strerror(errno.EFBIG):
            size = _limit(resource.RLIMIT_FSIZE, 1024)
            return f"files are limited to {size} KiB: raise `ulimit -f`"
        case errno.EIO | errno.ESTALE | errno.ENOTCONN:
            return _DISK
        case errno.ETIMEDOUT:
            return "is its server reachable?"
        case _:
            return None


def described(error: BaseException) -> str:
    """``error`` in a line, without numbers of errors: what, where, and what to do if that is known.

    Its type is left to those who show a mistake.
    """
    if not isinstance(error, OSError) or error.filename is None:
        return reason(error)
    what, known = f"{error.strerror}: {os.fsdecode(error.filename)}", advice(error)
    return what if known is None else f"{what} ({known})"


def reason(error: BaseException) -> str:
    """The same without where."""
    silent = os.strerror(errno.ENOMEM) if isinstance(error, MemoryError) else "failed"
    what, known = getattr(error, "strerror", None) or str(error) or silent, advice(error)
    return what if known is None else f"{what} ({known})"


_DISK = "the disk, or the server of the file system, has failed: `dmesg` or the server says why"
_MEMORY = "no memory: `ulimit -v` or the container limits it, or the machine has no more"


def _processes() -> str:
    most, address_space = _limit(resource.RLIMIT_NPROC), _limit(resource.RLIMIT_AS, 1024)
    memory = "memory"
    if address_space != "unlimited":  # each thread takes some for its stack
        memory = f"memory (`ulimit -v` is {address_space} KiB)"
    return (
        f"processes and threads are limited by `ulimit -u` ({most}), the container's pids.max or"
        f" {memory}: end some, or raise the limit"
    )


def _limit(which: int, unit: int = 1) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft // unit)
