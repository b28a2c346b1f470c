"""Ends whole process trees, and makes sure that nothing escapes from one.

It relies on this process being a *subreaper* (``host.prctl``): each orphaned descendant is adopted,
also one that called ``setsid`` or forked twice, so the tree can be walked until it is empty.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import timedelta
from functools import partial

import psutil

# A process that SIGKILL does not end is blocked in the kernel (state D, typically by a driver).
# Waiting longer than this for it has no use.
KILL_DEADLINE = timedelta(seconds=10)

_Look = Callable[[], list[psutil.Process]]


def end_descendants(
    grace: timedelta,
    own: AbstractSet[int] = frozenset(),
    *,
    spared: AbstractSet[int] = frozenset(),
    trees_of_others: Callable[[], AbstractSet[int]] = frozenset,
) -> list[int]:
    """End every descendant of this process but ``spared``: SIGTERM, ``grace``, SIGKILL.

    Returns the PIDs that survived even SIGKILL (see ``KILL_DEADLINE``); normally empty. Blocks
    for at most ``grace`` and the deadline. Reaps zombies, but for ``own``: children that someone
    else in this process waits for. ``trees_of_others`` are children of this process that are left
    alone with their descendants.
    """
    look = partial(_descendants, own | spared, spared, trees_of_others)
    if _signal_all(signal.SIGTERM, look):
        _wait_until_empty(grace, look)
    deadline = time.monotonic() + KILL_DEADLINE.total_seconds()
    # Repeatedly, because a process may fork between the listing and the signal.
    while _signal_all(signal.SIGKILL, look) and time.monotonic() < deadline:
        _wait_until_empty(timedelta(seconds=0.5), look)
    return [process.pid for process in look()]


def running(argument: str, left_out: AbstractSet[int]) -> list[int]:
    """The PIDs of descendants of this process, but ``left_out``, that have ``argument`` on their
    command line: of those that were started with it, and of what these have forked.
    """
    found = []
    for process in _descendants(left_out, left_out, frozenset):
        with suppress(psutil.Error):
            if argument in process.cmdline():
                found.append(process.pid)
    return found


def others_children(before: AbstractSet[int]) -> set[int]:
    """Children that this process has from the program it was before, which were ``before``, and
    what they have left to it: that has its session still, and all that it starts itself has not.
    """
    session = os.getsid(0)
    return {pid for pid in children() if pid in before or (before and _session(pid) == session)}


def children() -> set[int]:
    """The PIDs of this process's children, zombies too."""
    return {child.pid for child in psutil.Process().children()} if _has_children() else set()


def _has_children() -> bool:
    """Zombies too. Known without a look at all processes of the machine."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _descendants(
    own: AbstractSet[int],
    spared: AbstractSet[int],
    trees_of_others: Callable[[], AbstractSet[int]],
) -> list[psutil.Process]:
    """Living descendants of this process; zombies are reaped on the way."""
    if not _has_children():
        return []
    living, others = [], set(trees_of_others())
    for process in psutil.Process().children(recursive=True):  # a parent before its children
        try:
            if process.pid in others or process.ppid() in others:
                others.add(process.pid)
            elif process.status() != psutil.STATUS_ZOMBIE:
                if process.pid not in spared:
                    living.append(process)
            elif process.ppid() == os.getpid() and process.pid not in own:
                _reap(process.pid)
        except psutil.Error:
            continue
    return living


def _signal_all(signum: signal.Signals, look: _Look) -> list[psutil.Process]:
    processes = look()
    for process in processes:
        with suppress(psutil.Error, OSError):  # gone, or not ours to signal (sudo)
            process.send_signal(signum)
    return processes


def _wait_until_empty(limit: timedelta, look: _Look) -> None:
    deadline = time.monotonic() + limit.total_seconds()
    while (processes := look()) and time.monotonic() < deadline:
        wait_for_exit((process.pid for process in processes), deadline)


def wait_for_exit(pids: Iterable[int], deadline: float) -> None:
    """Block until all of ``pids`` have ended or ``deadline`` (monotonic seconds) has come."""
    poller = select.poll()
    open_fds: set[int] = set()
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                open_fds.add(fd)
                poller.register(fd, select.POLLIN)
        waiting = set(open_fds)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(max(1, round(left * 1000))):
                poller.unregister(fd)
                waiting.discard(fd)
    finally:
        for fd in open_fds:
            os.close(fd)


def reap_adopted(own: set[int]) -> None:
    """Reap zombies that this process adopted; stops at one of ``own``, which has its own waiter."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        _reap(ended.si_pid)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except OSError as error:
        if error.errno != errno.ECHILD:
            raise
