"""Process groups end without a deadlock, once, and without making anybody wait.

A Gloo backend ends by joining its worker threads. A worker that has just finished an operation
releases it, and takes the GIL for that where the operation holds the last reference to something
of Python: a tensor that the function has dropped, or what was set in torch's thread-local state.
If the group is freed with the GIL held, each waits for the other, and the process hangs with all
its threads. The bindings of groups have released the GIL since torch 2.8
(pytorch/pytorch#154976). The binding of DDP's reducer does not (seen in 2.13), and the reducer is
freed after the group's Python object: ``dist.barrier()``, ``destroy_process_group()`` and the end
of the function that made the model are enough, without us as well.

The bindings of the backends' own classes have always released the GIL. All it takes is that the
last reference to a backend is its Python object's: it is kept until the making of the next group
begins or the iteration ends, and dropped then if its group's Python object is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from ncclops.restart._groups.backends import (
    MAKER,
    all_backends,
    backends_of,
    has_watchdog,
    is_of_second_engine,
)
from ncclops.restart._groups.recorder import is_pending_in_group_of_second_engine
from ncclops.restart._interrupt.delicate import is_delicate
from ncclops.restart._interrupt.other_threads import makers_of_groups
from ncclops.restart.log import logged

_kept: dict[ref[Any], list[Any]] = {}  # by group
_keeper: int | None = None  # the process; a fork of it has none of torch's threads


@functools.cache
def keep_backends_longer_than_groups() -> None:
    """Make each backend outlive its group, for the rest of the process.

    The last reference to a group may be dropped by torch's tables, a model, the function's frames
    or the abort, on any thread: the one place common to all groups is where they are made. Groups
    made before are not changed. What is left when Python ends is never freed.
    """
    if not distributed.is_available():
        return
    global _keeper
    _keeper = os.getpid()
    register = distributed.ProcessGroup._register_backend

    def register_and_keep(group: Any, device: Any, backend_type: Any, backend: Any = None) -> None:
        makers_of_groups.add(threading.get_ident())
        register(group, device, backend_type, backend)
        _kept.setdefault(ref(group), []).append(backend)

    distributed.ProcessGroup._register_backend = register_and_keep
    make = getattr(distributed_c10d, MAKER)

    @functools.wraps(make)
    def release_and_make(*args: Any, **kwargs: Any) -> Any:
        # Before it waits for peers: where a script makes its groups anew after an error, they may
        # be in the last one, and come once its connections are closed.
        release_backends_of_ended_groups()
        return make(*args, **kwargs)

    setattr(distributed_c10d, MAKER, release_and_make)


# When Python ends it clears modules in no order that one could rely on: a model may go after the
# backends that are kept for it. And a thread that takes the GIL meanwhile is ended by Python in the
# middle of torch's code, which ends the process with SIGABRT (seen with Python 3.11).
_SETTLE_WITHIN_S = 5.0
# Who wants the GIL has had it by then.
_SETTLE_S = 0.02

_LOOK_EVERY_S = 0.1


@atexit.register  # while this is imported: what a script registers is dropped when it restarts
def leave_groups_to_the_kernel() -> None:
    """Have no backend freed from now on, and wait until torch's threads have left Python.

    The process is ending, and the kernel takes what they hold. NCCL's groups are ended as torch
    would do; what takes long there is left alone.
    """
    if _keeper is None:
        return
    kept = [each for backends in list(_kept.values()) for each in backends] + all_backends()
    for backend in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
    if not kept or os.getpid() != _keeper:
        return
    deadline = time.monotonic() + _SETTLE_WITHIN_S
    watched = {
        g: [b for b in backends_of(g) if has_watchdog(b)] for g in distributed_c10d._world.pg_map
    }
    groups = [group for group, found in watched.items() if found and is_first_to_end(group)]
    if groups:
        backends = [backend for group in groups for backend in watched.pop(group)]
        end_later(backends, groups).join(_SETTLE_WITHIN_S)
    time.sleep(_SETTLE_S)
    while _threads_of_others_in_python() and time.monotonic() < deadline:
        time.sleep(_SETTLE_S)


def _threads_of_others_in_python() -> bool:
    """Whether a thread that Python has not started executes Python, such as a callback of torch."""
    own = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    return not own.issuperset(sys._current_frames())


@functools.cache
def finish_operations_before_groups_end() -> None:
    """Have ``destroy_process_group`` wait where an abort ends the wait, for good.

    torch waits in NCCL for a group's operations, with a lock held that the abort needs, or in a
    group that the abort leaves alone. A rank that has finished, and whose peer hangs before its
    last collectives, could not be restarted. What the abort has come to meanwhile is not ended
    again.
    """
    if not distributed.is_available():
        return
    shut_down = getattr(distributed.ProcessGroup, "shutdown", None)
    if shut_down is None:
        return  # up to torch 2.6 a group's end aborts its operations

    def wait_and_shut_down(group: Any) -> None:
        if any(map(has_watchdog, backends_of(group))):
            if any(map(is_of_second_engine, backends_of(group))):
                _wait_for_operations_of_second_engine(group)
            else:
                with contextlib.suppress(RuntimeError):  # as where one has timed out
                    group._wait_for_pending_works()
            if not is_first_to_end(group):
                return
        shut_down(group)

    distributed.ProcessGroup.shutdown = wait_and_shut_down


def _wait_for_operations_of_second_engine(group: Any) -> None:
    """torch's second engine has no function that waits for them. Its recorder knows which group's
    are pending, and learns late that they are not, which the device tells at once."""
    device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    is_idle = threading.Event()

    def wait_for_device() -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
        is_idle.set()

    if is_pending_in_group_of_second_engine(group.group_name):
        threading.Thread(target=wait_for_device, name="ncclops-groups", daemon=True).start()
        while not is_idle.wait(_LOOK_EVERY_S) and not _has_timed_out(group):
            if not is_pending_in_group_of_second_engine(group.group_name):
                break


def _has_timed_out(group: Any) -> bool:
    """Whether torch waits no longer for an operation of ``group``."""
    return any(b.get_error().name == "TIMEOUT" for b in backends_of(group) if has_watchdog(b))


def release_backends_of_ended_groups() -> None:
    """Drop the backends whose groups are gone; waits, without the GIL, for their threads to end.

    May be interrupted at any point and called again.
    """
    for group in list(_kept):
        if group() is None:
            _kept.pop(group, None)


_ending: list[threading.Thread] = []


@is_delicate  # holds a lock of Python's, while it starts a thread
def end_groups_in_a_thread() -> None:
    """Like ``release_backends_of_ended_groups``, but nothing waits.

    Gloo looks every 10 ms whether one more connection of a group is to end. Nothing in the next
    iteration needs that.
    """
    ended = [_kept.pop(group, []) for group in list(_kept) if group() is None]
    _ending[:] = [thread for thread in _ending if thread.is_alive()]
    if ended:
        thread = threading.Thread(target=ended.clear, name="ncclops-groups", daemon=True)
        thread.start()
        _ending.append(thread)


def wait_for_groups_to_end(timeout_s: float) -> None:
    """Those that are just being ended in a thread: it should not be in that when Python ends."""
    deadline = time.monotonic() + timeout_s
    for thread in _ending:
        thread.join(max(0.0, deadline - time.monotonic()))


# torch ends an NCCL backend by joining its watchdog thread. One that has seen an error before it is
# asked to end, be it the abort itself, prints the collective's stack, which takes seconds the first
# time, and sleeps for 4 x TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, a minute by default, whatever
# TORCH_NCCL_DUMP_ON_TIMEOUT is. The first group's monitor thread, which is joined when the backend
# is freed, may then sleep for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC. Nothing in the next iteration needs
# either to have ended: the communicators are aborted, the store's name space is another one.


def end_later(
    backends: list[Any], groups: list[Any], *, before: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Join the watchdogs of aborted ``backends`` in a thread of its own, ``before`` first.

    The thread holds ``groups``, too: what frees the last reference to one joins as well, and that
    must not be the main thread, in the function's frames.
    """

    def end() -> None:
        before()
        for backend in backends:
            with logged(f"ending {type(backend).__name__}"):
                backend.shutdown() if hasattr(backend, "shutdown") else backend._shutdown()
        # Each backend after its group, see keep_backends_longer_than_groups.
        kept = [_kept.pop(ref(group), []) for group in groups]
        groups.clear()
        kept.clear()
        backends.clear()

    thread = threading.Thread(target=end, name="ncclops-groups", daemon=True)
    thread.start()
    return thread


# An NCCL group is ended once: by the abort, or by destroy_process_group in the main thread, whoever
# comes first. torch's NCCLComm::destroy keeps the handle of what it has destroyed, and an abort
# after it hands that to NCCL again, which has freed it (seen in 2.13: SIGSEGV). Both also join the
# watchdog, which only one thread may. Nothing is lost where the abort leaves a group to the main
# thread, which holds the locks that an abort needs while it destroys one.
_ended: dict[ref[Any], object] = {}


def is_first_to_end(group: Any) -> bool:
    claim = object()
    # One step: a lock could be lost where the main thread is interrupted.
    return _ended.setdefault(ref(group, _ended.pop), claim) is claim


def goes_on(group: Any) -> None:
    """An abort has claimed ``group`` and not ended it: the next one may."""
    _ended.pop(ref(group), None)
