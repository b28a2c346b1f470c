"""What is said where a machine or a limit has run out of something."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from ncclops.exhausted import advice, described


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "fs.file-max"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "pids.max"),
        (RuntimeError("can't start new thread"), "pids.max"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory"),
        (MemoryError(), "no memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "df -i"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
        (OSError(errno.EROFS, "Read-only file system"), "read-only"),
        (OSError(errno.EIO, "Input/output error"), "dmesg"),
        (OSError(errno.ESTALE, "Stale file handle"), "server of the file system"),
        (
            OSError(errno.ENOTCONN, "Transport endpoint is not connected"),
            "server of the file system",
        ),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "ulimit -f"),
        (TimeoutError(errno.ETIMEDOUT, "the file system does not answer"), "server"),
    ],
)
def test_what_is_exhausted_is_named_with_what_to_do(error: Exception, named: str) -> None:
    assert named in str(advice(error))
    assert described(error).count("\n") == 0


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EFBIG, "it is larger than 64 MiB"),  # a limit of ours, on what is read
        FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
        RuntimeError("another"),
        ValueError("no"),
    ],
)
def test_other_errors_are_not_explained(error: Exception) -> None:
    assert advice(error) is None


def test_a_line_has_what_where_and_what_to_do() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    line = described(OSError(errno.EMFILE, "Too many open files", b"/run/x"))
    limited = f"open files are limited to {soft}: raise `ulimit -n`"
    assert line == f"Too many open files: /run/x ({limited})"


def test_memory_that_python_lacks_is_said() -> None:
    line = described(MemoryError())  # which says nothing itself
    assert line.startswith("Cannot allocate memory (no memory: ")


def test_a_limit_on_memory_is_named_where_there_are_no_more_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = {resource.RLIMIT_NPROC: 512, resource.RLIMIT_AS: 900 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (of[which], of[which]))
    assert "memory (`ulimit -v` is 921600 KiB)" in str(
        advice(RuntimeError("can't start new thread"))
    )
