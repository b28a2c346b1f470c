"""A run that was started from Python: its launcher is a separate process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ncclops.errors import NcclopsError, UsageError
from ncclops.launch.request import LaunchRequest
from ncclops.launch.start_report import VARIABLE, read_report
from ncclops.launch.verdict import RunVerdict, read_verdict
from ncclops.record.paths import RunPaths

# Until the run is recorded: imports from a slow shared disk, a driver that is not loaded yet.
_START_LIMIT = timedelta(minutes=5)
_REPORT_BYTES = 1 << 16
_MILLISECOND = timedelta(milliseconds=1)

Output = int | IO[bytes] | IO[str] | None


class LaunchedRun:
    """One run under way, or ended. Methods may be called from any thread.

    As a context manager it interrupts the run when the block is left before the run has ended.
    """

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        self._process = process
        self._ended = os.pidfd_open(process.pid)
        self.run_dir = run_dir
        """The run directory, absolute; the contracts describe its files."""

    def __repr__(self) -> str:
        return f"<LaunchedRun {str(self.run_dir)!r}, launcher {self.pid}>"

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that becomes readable when the run has ended, for ``select`` and asyncio."""
        return self._ended

    def is_running(self) -> bool:
        """Whether the launcher still runs; never waits."""
        return not self._wait_for_end(timedelta(0))

    def wait(self, timeout: timedelta | None = None) -> RunVerdict:
        """Wait for the end of the run, at most ``timeout`` (None: as long as it takes).

        Raises ``TimeoutError`` when it has not ended by then; the run goes on. Raises
        ``UsageError`` for a ``timeout`` of another type, and ``NcclopsError`` when the run has
        ended without a verdict, which takes a SIGKILL of its agent or a full disk.
        """
        _check_duration("timeout", timeout)
        if not self._wait_for_end(timeout):
            raise TimeoutError(f"the run in {self.run_dir} has not ended after {timeout}")
        code = self._process.wait()
        if not RunPaths(self.run_dir).verdict.exists():
            raise NcclopsError(
                f"the run ended without a verdict (launcher's exit code {code}): its agent was"
                f" killed, or the disk is full; what it recorded is in {self.run_dir}"
            )
        return read_verdict(self.run_dir)

    def stop(self, reason: str = "no reason given", grace: timedelta | None = None) -> str:
        """Ask the run to stop after the same step on all ranks; returns its answer, at once.

        ``grace`` is how long workers have for that before they are ended (default 5 min). Raises
        ``NcclopsError`` when its agent is gone or refuses. ``wait`` says when it has stopped.
        """
        from ncclops.control import client
        from ncclops.durations import format_duration

        _check_duration("grace", grace)
        text = None if grace is None else format_duration(grace)
        command = {"action": "stop", "reason": reason, "by": "ncclops.launch", "grace": text}
        return client.send(self.run_dir, command)

    def interrupt(self) -> None:
        """What Ctrl-C does to `ncclops launch`: workers get SIGTERM, and SIGKILL if they must."""
        with suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._ended, signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_running():
            self.interrupt()
            self._wait_for_end(None)
        self._process.wait()

    def __del__(self) -> None:
        # Also of an object whose __init__ failed.
        if (ended := self.__dict__.pop("_ended", None)) is not None:
            os.close(ended)

    def _wait_for_end(self, timeout: timedelta | None) -> bool:
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        # poll would wait for ever on a negative number, as a deadline that has passed leaves it.
        return bool(poll.poll(None if timeout is None else max(0.0, timeout / _MILLISECOND)))


def _check_duration(name: str, value: timedelta | None) -> None:
    if not isinstance(value, timedelta | None):
        raise UsageError(f"{name}={value!r}: give a timedelta, or None")


def start(
    request: LaunchRequest,
    *,
    environ: Mapping[str, str] | None = None,
    stdout: Output = None,
    stderr: Output = None,
) -> LaunchedRun:
    """Start what ``request`` asks for; returns when the run is recorded, long before it ends.

    The launcher is a separate process, in a session of its own: this process is not forked, none
    of its signal handlers changes, and the run outlives it, as under ``nohup``. ``environ`` is the
    environment that the launcher finds (default: this process's). ``stdout`` and ``stderr`` are as
    in ``subprocess.Popen``; by default output goes where this process's goes. Any thread.

    Raises ``UsageError`` or ``ProfileError`` when the request cannot be met, ``NcclopsError`` when
    the launcher dies before the run has begun.
    """
    words = LaunchRequest.checked(request).command_line()
    ours, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ncclops", *words],
            env={**(os.environ if environ is None else environ), VARIABLE: str(theirs)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[theirs],
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        line = _read_line(ours)
        if line:
            return LaunchedRun(process, read_report(line))
    except BaseException:
        _end(process)
        raise
    finally:
        os.close(ours)
    _end(process)
    raise NcclopsError(
        f"the launcher ended with exit code {process.returncode} before the run began: its standard"
        " error says why"
    )


def launch(
    request: LaunchRequest,
    *,
    environ: Mapping[str, str] | None = None,
    stdout: Output = None,
    stderr: Output = None,
) -> RunVerdict:
    """Start what ``request`` asks for, wait for its end, and return the verdict.

    A run that fails is a verdict, not an exception. ``KeyboardInterrupt`` ends the run as Ctrl-C
    does `ncclops launch`, and is raised again when nothing of it is left. Otherwise as
    :func:`start`.
    """
    with start(request, environ=environ, stdout=stdout, stderr=stderr) as run:
        return run.wait()


def _read_line(fd: int) -> bytes:
    """The launcher's report; empty when it ended without one."""
    deadline = time.monotonic() + _START_LIMIT.total_seconds()
    read = b""
    while not read.endswith(b"\n"):
        left = deadline - time.monotonic()
        if not select.select([fd], [], [], max(0.0, left))[0]:
            raise NcclopsError(f"the launcher did not begin a run within {_START_LIMIT}")
        if not (chunk := os.read(fd, _REPORT_BYTES)):
            return b""
        read += chunk
    return read


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that has begun no run, or one that no caller can refer to."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait()
