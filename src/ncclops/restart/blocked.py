"""A main thread that waits for its peers in NCCL or Gloo, and that no abort frees.

``ncclCommInitRank`` waits for all ranks of the communicator. Where one of them has failed, no abort
frees the others: torch knows a communicator when that has returned. (A non-blocking one it does
know, and its abort waits for the making to end.) In a backward pass it is a thread of autograd that
makes the communicator: the first of DDP without ``init_sync``, or of HSDP's replicas. The main
thread waits for that thread.

Gloo never wakes who waits for a send that could not be written, as its peer was killed with unread
data (see ``_groups.gloo_sockets``). That is the main thread in a ``send``, and in a collective a
thread of the group's, which the main thread waits for wherever it is. Both wait with a time limit,
the group's timeout, which the kernel shows; a thread of the group's without work waits without one.

Only the end of the process helps, and whoever waits for the restart should not have to wait for
long.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

from torch import distributed

from ncclops.restart._groups import aborting
from ncclops.restart._interrupt.threads import names_of_threads, wait_for_thread
from ncclops.restart._monitor.link import FREED_WITHIN_S
from ncclops.restart.attribution import Fault
from ncclops.restart.ledger import Ledger
from ncclops.restart.monitor_process import MonitorProcess
from ncclops.restart.waiting import is_in_backward, is_in_collective, is_of_torch

log = logging.getLogger("ncclops.restart")

_LOOK_EVERY_S = 0.1
# torch's watchdog may hold up what an abort has freed: it locks the dynamic loader while it prints
# a stack. So many looks in a row have to show it idle, or the same wait.
_EQUAL_LOOKS = 3
_ASK_EVERY_S = 0.5
# Where nothing shows that a rank is missing, the making of a large communicator may just take time.
_LONGEST_S = 28.0
# A backward pass may have work of its own, native and seen in no frame: what is done for the first
# time, such as loading kernels, takes seconds.
_BACKWARD_ENDS_WITHIN_S = 5.0
# Gloo's own thread ends the waits, when it gets to run.
_GLOO_FREES_WITHIN_S = 5.0

# torch's name for the threads in which a group of Gloo carries out its collectives.
_GLOO_THREAD = "pt_gloo_runloop"

# What torch's functions call the group that they use.
_GROUP_NAMES = ("group", "process_group", "pg")


Listener = Callable[[int, str, Fault | None], object]
"""Told the initial rank of this process, in which library it waits (``NCCL`` or ``Gloo``), and what
has ended the iteration, as far as it is known, just before it is ended. Called in a thread of its
own."""

_listener: Listener = lambda _rank, _library, _cause: None  # noqa: E731


def register(listener: Listener) -> None:
    """Have ``listener`` told from now on: no other rank may be left that could tell of it."""
    global _listener
    _listener = listener


class _Sign(NamedTuple):
    """What shows that the main thread waits: ``look`` gives the same, and not ``None``, each time.

    What has not been freed ``freed_within_s`` after the abort is not freed any more.
    """

    look: Callable[[], tuple[str, ...] | None]
    freed_within_s: float


_IsThere = Callable[[FrameType | None], bool]
"""Whether a frame is the one in which the main thread was, at the same instruction."""


class BlockedMainThread:
    """Finds that, after each abort, in one call of a wrapped function.

    ``iteration`` tells the present one; ``submit`` has a job run with a ledger, in a thread that
    may wait for the store.
    """

    def __init__(
        self,
        initial_rank: int,
        main_thread: int,
        monitor_process: MonitorProcess,
        iteration: Callable[[], int],
        submit: Callable[[Callable[[Ledger], None]], None],
    ) -> None:
        self._initial_rank = initial_rank
        self._main_thread = main_thread
        self._monitor_process = monitor_process
        self._iteration = iteration
        self._submit = submit
        self._moved = threading.Event()

    def look(self, iteration: int) -> None:
        """The groups are aborted: from now on, until the main thread moves. Does not block."""
        frame = sys._current_frames().get(self._main_thread)
        if frame is None:
            return
        in_collective = is_in_collective(frame)
        if aborting.aborted_nccl and in_collective:
            sign, is_there = _Sign(_cpu_of_watchdogs, FREED_WITHIN_S), _is(frame)
        elif aborting.aborted_nccl and is_in_backward(frame):
            look = _cpu_of_watchdogs_and_main_thread
            sign, is_there = _Sign(look, _BACKWARD_ENDS_WITHIN_S), _is(frame)
        else:
            sign = _Sign(partial(waits_in_gloo, in_collective), _GLOO_FREES_WITHIN_S)
            is_there = _is_like(frame)
        self._moved = threading.Event()
        watch = threading.Thread(
            target=self._watch,
            args=(iteration, is_there, members(frame), sign, in_collective, self._moved),
            name="ncclops-blocked",
            daemon=True,
        )
        watch.start()

    def has_moved(self) -> None:
        """The main thread is out of the function."""
        self._moved.set()

    def _watch(
        self,
        iteration: int,
        is_there: _IsThere,
        numbers: frozenset[int] | None,
        sign: _Sign,
        in_collective: bool,
        moved: threading.Event,
    ) -> None:
        page = self._monitor_process.page
        since, asked_at = page.now(), 0.0
        equal_looks, seen = 0, sign.look()
        cannot_come = threading.Event()
        cause: Fault | None = None

        def ask(ledger: Ledger) -> None:
            nonlocal cause
            cause = ledger.cause_so_far(iteration)
            if ledger.is_waited_for_in_vain(iteration, numbers):
                cannot_come.set()

        while not moved.wait(_LOOK_EVERY_S) and self._is_at(iteration, is_there):
            now, seen_before, seen = page.now(), seen, sign.look()
            equal_looks = equal_looks + 1 if seen == seen_before is not None else 0
            if now - asked_at > _ASK_EVERY_S:
                asked_at = now
                self._submit(ask)
            if now - since < sign.freed_within_s or equal_looks < _EQUAL_LOOKS:
                continue
            if cannot_come.is_set() or now - since > _LONGEST_S:
                if self._is_at(iteration, is_there):
                    library = "Gloo" if waits_in_gloo(in_collective) else "NCCL"
                    self._have_it_ended(since, library, cause)
                return

    def _is_at(self, iteration: int, is_there: _IsThere) -> bool:
        frame = sys._current_frames().get(self._main_thread)
        return is_there(frame) and self._iteration() == iteration

    def _have_it_ended(self, since: float, library: str, cause: Fault | None) -> None:
        log.warning(
            "the main thread waits in %s, which no abort ends: this process is ended", library
        )
        try:
            _listener(self._initial_rank, library, cause)
        except Exception:
            log.exception("telling that this process is ended failed")
        self._monitor_process.page.blocked_since = since
        self._monitor_process.send({"op": "blocked", "library": library})


def _is(frame: FrameType) -> _IsThere:
    instruction = frame.f_lasti
    return lambda now: now is frame and now.f_lasti == instruction


def _is_like(frame: FrameType) -> _IsThere:
    """Without keeping the frame, and what it refers to, such as data loaders with processes."""
    number, instruction = id(frame), frame.f_lasti
    return lambda now: now is not None and (id(now), now.f_lasti) == (number, instruction)


def members(main_thread: FrameType) -> frozenset[int] | None:
    """The ranks of the group that it is using, by their numbers; ``None``: maybe all."""
    for frame, _ in walk_stack(main_thread):
        variables = frame.f_locals if is_of_torch(frame) else {}
        for name in _GROUP_NAMES:
            group = variables.get(name)
            if isinstance(group, distributed.ProcessGroup):
                return aborting.members_of_aborted(group)
    return None


def waits_in_gloo(in_collective: bool) -> tuple[str, ...] | None:
    """Where the main thread and threads of groups wait for an operation of Gloo; the main thread by
    itself only where it is ``in_collective``. ``None``: they do not, or the kernel does not tell.
    """
    own = wait_for_thread(os.getpid())
    if own is None:
        return None
    found = [own.place] if own.is_limited and in_collective else []
    for thread, name in sorted(names_of_threads().items()):
        wait = wait_for_thread(thread) if name == _GLOO_THREAD else None
        if wait is not None and wait.is_limited:
            found += [own.place, f"{thread} {wait.place}"]
    return tuple(found) or None


def _cpu_of_watchdogs() -> tuple[str, ...] | None:
    """The CPU time that each of torch's watchdogs has used; ``None``: one of them is running."""
    return _cpu_of(lambda name, _: "pt_nccl" in name)


def _cpu_of_watchdogs_and_main_thread() -> tuple[str, ...] | None:
    return _cpu_of(lambda name, thread: "pt_nccl" in name or thread == os.getpid())


def _cpu_of(meant: Callable[[str, int], bool]) -> tuple[str, ...] | None:
    found = []
    for path in sorted(Path("/proc/self/task").glob("*/stat")):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:  # the thread has ended
            continue
        fields = rest.split()
        if meant(name, int(path.parent.name)):
            if fields[0] in "RD":
                return None
            found.append(" ".join([name, *fields[11:13]]))
    return tuple(found)
