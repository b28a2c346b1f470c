"""Commands of a site's own checks, run side by side, each with a deadline.

    python -m ncclops.preflight.machine.commands PARENT < COMMANDS > ANSWERS

All run below one process of ours, which adopts what they leave behind: whatever they start has
ended when it ends, also where the process that asks is killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec

from ncclops.host import prctl
from ncclops.host.process_tree import KILL_DEADLINE, end_descendants
from ncclops.preflight.site_checks import Ended, SiteCheck
from ncclops.process_ends import signal_name

# Until an interpreter runs, which on a loaded machine is no fault of a check.
_START_S = 60.0
_MOST_BYTES = 1 << 16
_MOST_CHARS = 400
_REAP_S = 2.0


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    checks: tuple[SiteCheck, ...]
    environ: dict[str, str]


def run(checks: Sequence[SiteCheck], environ: Mapping[str, str]) -> list[Ended]:
    """How the commands of ``checks`` end, in their order, in the environment ``environ``.

    Takes as long as the slowest may, and some seconds. Starts a process, which has ended with all
    that it has started when this returns, but for what a driver holds. Any thread.
    """
    if not checks:
        return []
    package = str(Path(__file__).parents[3])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    within_s = max(check.limit_s for check in checks) + KILL_DEADLINE.total_seconds() + _START_S
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ncclops.preflight.machine.commands", str(os.getpid())],
            input=msgspec.json.encode(_Asked(checks=tuple(checks), environ=dict(environ))),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            timeout=within_s,
        )
        answers = msgspec.json.decode(done.stdout, type=list[Ended])
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        return [Ended(unknown="the process that runs it was ended") for _ in checks]
    return answers


def _run(check: SiteCheck, environ: Mapping[str, str]) -> Ended:
    end = time.monotonic() + check.limit_s
    try:
        process = subprocess.Popen(
            check.command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a name in environ that no process takes
        return Ended(problem=getattr(error, "strerror", None) or str(error))
    output, errors, in_time = _read(process, end)
    # Before it is reaped: until then no other process has its number.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)
    if not in_time or process.returncode is None:
        return Ended(late=True)
    said = _line(output) or _line(errors)
    if process.returncode < 0:
        return Ended(signal=signal_name(-process.returncode), said=said)
    return Ended(code=process.returncode, said=said)


def _read(process: subprocess.Popen[bytes], end: float) -> tuple[bytes, bytes, bool]:
    """The beginnings of its output and of its errors, and whether it has ended before ``end``."""
    assert process.stdout is not None
    assert process.stderr is not None
    parts = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    pidfd = os.pidfd_open(process.pid)
    has_ended = False
    with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
        for fd in (*parts, pidfd):
            selector.register(fd, selectors.EVENT_READ)
        # What a child that is left holds open is not waited for.
        while not has_ended and (left := end - time.monotonic()) > 0:
            ready = {key.fd for key, _ in selector.select(left)}
            has_ended = pidfd in ready
            for fd in parts.keys() & ready:
                if taken := os.read(fd, _MOST_BYTES):
                    parts[fd] = (parts[fd] + taken)[:_MOST_BYTES]
                else:
                    selector.unregister(fd)
        os.close(pidfd)
    output, errors = parts.values()
    return output, errors, has_ended


def _line(output: bytes) -> str:
    """The first line with something in it."""
    lines = (line.strip() for line in output.decode(errors="replace").splitlines())
    return next(filter(None, lines), "")[:_MOST_CHARS]


def main() -> None:
    """Run what standard input names, answer, and leave nothing behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prctl.become_subreaper()
    with suppress(OSError):
        prctl.die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=_Asked)
    threads = ThreadPoolExecutor(len(asked.checks))
    try:
        answers = list(threads.map(lambda check: _run(check, asked.environ), asked.checks))
        sys.stdout.buffer.write(msgspec.json.encode(answers))
        sys.stdout.buffer.flush()
    finally:
        end_descendants(timedelta(0))


if __name__ == "__main__":
    main()
