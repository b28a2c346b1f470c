"""torch's process groups: how they are made inside the wrapped function, aborted and released.

This module and ``_groups.gloo_sockets`` know torch's internal tables.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlparse
from weakref import ref

import torch
from torch import distributed
from torch.distributed import Store, distributed_c10d

from ncclops.restart._groups import kept_default, shrinking
from ncclops.restart._groups.gloo_sockets import release_gloo_connections
from ncclops.restart._interrupt.delicate import holds_a_lock
from ncclops.restart._interrupt.other_threads import makers_of_groups
from ncclops.restart.log import logged

# What the abort of an NCCL backend is called, newest torch first.
_ABORT_NAMES = ("abort", "_abort", "_shutdown")


# Makes the backends of a group, for all of torch's functions that make one but ``split_group``.
_MAKER = "_new_process_group_helper"

# What ``destroy_process_group`` empties, where it comes so far; each torch has most of them.
_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
    "pg_default_device",
    "pg_flight_recorder_hooks",
    "comms",
)


def forget_failed_groups() -> None:
    """Leave nothing of the last iteration's groups, now that all ranks are out of it.

    A group that was completed just after the abort had looked for it is aborted now. Gloo's
    connections are closed. torch's tables are emptied whatever is in them: where the making or the
    end of a group was interrupted they hold half of it, the name is taken for ever, and the rank
    would look for its peers under other names than they use, as torch numbers groups by a counter.
    The one that outlives restarts (``_groups.kept_default``, ``_groups.shrinking``) stays.
    """
    abort_groups()
    shrinking.give_up()
    end_groups_in_a_thread()
    release_gloo_connections()
    _empty_tables()
    _hooks.clear()
    makers_of_groups.clear()
    global _newest_ended
    _newest_ended = max(recorded_groups(), default=-1)


def _empty_tables() -> None:
    world = getattr(distributed_c10d, "_world", None)
    if world is None:
        return
    default = kept_default.kept()
    kept = None if default is None else kept_default.Entries(default.group)
    if distributed.is_initialized():
        distributed_c10d._update_default_pg(None)
    for name in _TABLES:
        table = getattr(world, name, None)
        if table is not None:
            table.clear()
    unregister = getattr(torch._C._distributed_c10d, "_unregister_all_process_groups", None)
    if unregister is not None:
        unregister()
    world.group_count = 0
    if kept is not None:
        kept.put_back()
        distributed_c10d._update_default_pg(kept.group)


# What is to happen before an abort ends waits of the main thread without an error. Set in the
# thread that aborts.
before_silent_ends: ContextVar[Callable[[], object]] = ContextVar(
    "before_silent_ends", default=lambda: None
)


def abort_groups(main_thread: FrameType | None = None) -> None:
    """Abort the groups there are, and destroy them.

    Also those that the main thread is just making, where its present frame is given: torch
    connects some before they are in its tables, and waits in that for peers.
    """
    group, groups = distributed.group.WORLD, list(distributed_c10d._world.pg_map)
    backends = _backends() + _backends_in_the_making(main_thread)
    watched = [backend for backend in backends if _has_watchdog(backend)]
    to_end = [each for each in groups if _is_first_to_end(each)]
    ending = [b for each in groups if each not in to_end for b in backends_of(each)]
    backends = [b for b in backends if not (_has_watchdog(b) and b in ending)]
    global aborted_nccl, _members
    aborted_nccl, ranks = bool(watched), distributed_c10d._world.pg_group_ranks
    _members = {id(each): frozenset(ranks[each]) for each in groups if each in ranks}
    if watched:
        # The abort ends a wait for the device without an error, and the main thread goes on: it
        # must not find these groups, as destroy_process_group() would end them, too, and hang.
        _hooks.extend(getattr(distributed_c10d._world, "pg_flight_recorder_hooks", {}).values())
        _empty_tables()
        before_silent_ends.get()()
    _abort(backends)
    # An abort that took too long was given up; the groups there are now are not its own.
    if not watched and distributed.is_initialized() and distributed.group.WORLD is group:
        with logged("destroy_process_group"):
            if kept_default.is_kept(group):
                kept_default.end_others()
            else:
                distributed.destroy_process_group()
    if watched:
        kept = shrinking.revoked()
        ended = [
            b for b in backends if _has_watchdog(b) and (kept is None or b is not kept.backend)
        ]
        _end_later(ended, [each for each in to_end if kept is None or each is not kept.group])


# The flight recorder's, of aborted groups. Who drops one takes it out of a table of the group, in
# which the main thread may be looking in a collective (seen in torch 2.15: SIGSEGV in
# ProcessGroup::firePostHook). They are kept until it is out of the function.
_hooks: list[Any] = []


# Whether the latest abort has met groups of NCCL, and the ranks of each group by its identity.
aborted_nccl = False
_members: dict[int, frozenset[int]] = {}


def members_of_aborted(group: Any) -> frozenset[int] | None:
    """The ranks of ``group``, which the latest abort has met; ``None``: it has not."""
    return _members.get(id(group))


def _abort(backends: list[Any]) -> None:
    """Abort all backends at once: one may wait for another's peers."""
    together = [backend for backend in backends if _is_of_second_engine(backend)]
    threads = [
        threading.Thread(target=_abort_backend, args=(backend,), daemon=True)
        for backend in backends
        if backend not in together
    ]
    if together:
        threads.append(threading.Thread(target=_abort_together, args=(together,), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort_backend(backend: Any) -> None:
    with logged(f"revoking {type(backend).__name__}"):
        if shrinking.revoke(backend):
            return
    abort = next((getattr(backend, n) for n in _ABORT_NAMES if hasattr(backend, n)), None)
    if abort is not None:
        with logged(f"aborting {type(backend).__name__}"):
            abort()


def _is_of_second_engine(backend: Any) -> bool:
    return type(backend).__name__ == "ProcessGroupNCCL2"


def _abort_together(backends: list[Any]) -> None:
    """Abort groups of torch's second NCCL engine, which holds one lock in each call of NCCL.

    The first one would wait for its kernels behind those of another, for ever. In a group of NCCL's
    calls all are aborted at its end.
    """
    with logged("aborting groups together"):
        nccl = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
        nccl.ncclGroupStart()
        for backend in backends:
            _abort_backend(backend)
        nccl.ncclGroupEnd()


# torch ends an NCCL backend by joining its watchdog thread. One that has seen an error before it is
# asked to end, be it the abort itself, prints the collective's stack, which takes seconds the first
# time, and sleeps for 4 x TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, a minute by default, whatever
# TORCH_NCCL_DUMP_ON_TIMEOUT is. The first group's monitor thread, which is joined when the backend
# is freed, may then sleep for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC. Nothing in the next iteration needs
# either to have ended: the communicators are aborted, the store's name space is another one.


def _has_watchdog(backend: Any) -> bool:
    return type(backend).__name__.startswith("ProcessGroupNCCL")


def abort_later(backends: list[Any], groups: list[Any]) -> None:
    """Abort ``backends``, of which no operation is waited for, and end ``groups``. Any thread."""
    _end_later(backends, groups, abort_first=True)


def _end_later(
    backends: list[Any], groups: list[Any], *, abort_first: bool = False
) -> threading.Thread:
    """Join the watchdogs of aborted ``backends`` in a thread of its own.

    The thread holds ``groups``, too: what frees the last reference to one joins as well, and that
    must not be the main thread, in the function's frames.
    """

    def end() -> None:
        if abort_first:
            _abort(backends)
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


def _is_first_to_end(group: Any) -> bool:
    claim = object()
    # One step: a lock could be lost where the main thread is interrupted.
    return _ended.setdefault(ref(group, _ended.pop), claim) is claim


def _backends() -> list[Any]:
    """Each backend object of each group once; groups may share them."""
    found: dict[int, Any] = {}
    for group in list(distributed_c10d._world.pg_map):
        found |= {id(backend): backend for backend in backends_of(group)}
    return list(found.values())


def backends_of(group: Any) -> Iterator[Any]:
    """The backend objects of ``group``, one for each kind of device."""
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device(device))
            # TORCH_DISTRIBUTED_DEBUG=DETAIL puts one around it that passes no abort on.
            yield getattr(backend, "wrapped_pg", backend)


def nccl_error() -> str | None:
    """What NCCL has reported of a communicator outside of any call; None: nothing.

    torch's watchdog asks for it. With ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` it only prints what it
    finds, and the ranks wait. Before torch 2.7 nothing else says so.
    """
    for group in list(distributed_c10d._world.pg_map):
        for backend in backends_of(group):
            if (error := error_of(backend)) is not None:
                return f"NCCL reports an error of group {group.group_desc} ({error})"
    return None


def error_of(backend: Any) -> str | None:
    """Likewise, of one backend."""
    if _has_watchdog(backend) and hasattr(backend, "get_error"):
        error: str = backend.get_error().name
        return error if error in _NCCL_ERRORS else None
    return None


def has_pending_operation() -> bool:
    """Whether an operation of NCCL has not ended, as torch's flight recorder knows it.

    A thread that waits for the device is not in ``torch.distributed`` then, and waits for its peers
    all the same. The recorder's counts do not tell: messages and collectives are numbered apart,
    and counted together. Asks CUDA about operations that are pending.
    """
    return any(
        operation["pg_id"] > _newest_ended or operation["process_group"][0] in outlive
        for operation in pending_operations()
    )


def pending_operations() -> Sequence[dict[str, Any]]:
    """Operations of NCCL that have not ended, as torch's flight recorder has them."""
    found: Sequence[dict[str, Any]] = _recorded(with_operations=True).get("entries", ())
    return found


def may_have_pending_operation() -> bool:
    """Likewise, or the recorder has nothing of NCCL: it is off, or no group was used.

    It is off with ``TORCH_FR_BUFFER_SIZE=0``, which torch 2.7 to 2.10 have as default.
    """
    return has_pending_operation() or not recorded_groups()


# The recorder's highest number of a group of an earlier iteration, whose operations stay pending.
_newest_ended = -1
# The names of such groups that have not ended: see ``_groups.kept_beside``.
outlive: set[str] = set()


def recorded_groups() -> list[int]:
    """The recorder's numbers of the NCCL groups of this process; of ended ones as well."""
    return list(map(int, _recorded().get("pg_status", ())))


def recorded_of_gloo() -> dict[Any, dict[str, int]]:
    """What the recorder has of Gloo's groups, by its numbers; of ended ones as well."""
    found: dict[Any, dict[str, int]] = _recorded("_dump_fr_trace").get("pg_status", {})
    return found


def _recorded(
    function: str = "_dump_nccl_trace", *, with_operations: bool = False
) -> dict[str, Any]:
    """What the recorder of ``function`` has of groups, and of the operations that are pending."""
    dump = getattr(torch._C._distributed_c10d, function, None)
    return {} if dump is None else pickle.loads(dump(with_operations, False, True))


# Not TIMEOUT: how long a rank may wait is what the soft timeout says.
_NCCL_ERRORS = ("COMM_ERROR", "REMOTE_ERROR")


def _backends_in_the_making(main_thread: FrameType | None) -> list[Any]:
    """Those that ``init_process_group`` or ``new_group`` has made, and not yet put on record."""
    found: dict[int, Any] = {}
    for frame, _ in traceback.walk_stack(main_thread) if main_thread is not None else ():
        if frame.f_code.co_name == _MAKER:
            variables = frame.f_locals
            for name in ("backend_class", "eager_backend"):
                if (backend := variables.get(name)) is not None:
                    found[id(backend)] = backend
    return list(found.values())


# --- the exception hook ---------------------------------------------------------------------------
#
# Each ``init_process_group`` puts a hook in front of ``sys.excepthook`` which prefixes the output
# of the one before with the rank: a traceback would have a prefix more after every restart, and
# after a thousand the hooks would exceed the recursion limit.


def undo_excepthook_of_torch() -> None:
    """Take the hooks of the last iteration's groups away; one that a user has set stays."""
    hook = sys.excepthook
    while (before := _hook_before(hook)) is not None:
        hook = before
    sys.excepthook = hook


def _hook_before(hook: Any) -> Any:
    """The hook that was there before torch's; ``None`` if ``hook`` is not torch's."""
    if getattr(hook, "__name__", None) != "_distributed_excepthook":
        return None
    closure = inspect.getclosurevars(hook).nonlocals
    return closure.get("old_hook")


# --- rendezvous -----------------------------------------------------------------------------------
#
# ``env://`` makes rank 0 serve a store at ``MASTER_ADDR:MASTER_PORT``. After a restart rank 0 may
# be a process on another node, or the port may still be busy; under torchrun all iterations would
# share one store and find each other's keys. The wrapper has a store that survives all of that:
# inside the function, ``env://`` leads to it, with a separate name space per iteration. Other
# init methods and explicit stores are left alone.


@contextlib.contextmanager
def env_leads_to(
    store_for_groups: Callable[[], Store], group_is_made: Callable[[], object]
) -> Iterator[None]:
    """While inside, ``env://`` uses ``store_for_groups()``.

    ``group_is_made`` is called when the making of a default group with that has succeeded.
    """
    # torch.distributed.rendezvous is a function of that name, which shadows the module
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(module, "_rendezvous_handlers", None)
    if handlers is None or "env" not in handlers:
        yield
        return

    def handler(url: str, *_args: Any, **_kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        query = parse_qs(urlparse(url).query)
        rank = query.get("rank", [os.environ["RANK"]])[0]
        world_size = query.get("world_size", [os.environ["WORLD_SIZE"]])[0]
        try:
            yield store_for_groups(), int(rank), int(world_size)
        finally:  # torch lets go of this when init_process_group() ends
            if distributed.is_initialized():
                group_is_made()
        raise RuntimeError("env:// cannot be iterated again")

    original, handlers["env"] = handlers["env"], handler
    try:
        yield
    finally:
        handlers["env"] = original


# --- letting groups end without a deadlock --------------------------------------------------------
#
# A Gloo backend ends by joining its worker threads. A worker that has just finished an operation
# releases it, and takes the GIL for that where the operation holds the last reference to something
# of Python: a tensor that the function has dropped, or what was set in torch's thread-local state.
# If the group is freed with the GIL held, each waits for the other, and the process hangs with all
# its threads. The bindings of groups have released the GIL since torch 2.8
# (pytorch/pytorch#154976). The binding of DDP's reducer does not (seen in 2.13), and the reducer is
# freed after the group's Python object: ``dist.barrier()``, ``destroy_process_group()`` and the end
# of the function that made the model are enough, without us as well.
#
# The bindings of the backends' own classes have always released the GIL. All it takes is that the
# last reference to a backend is its Python object's: it is kept until the making of the next group
# begins or the iteration ends, and dropped then if its group's Python object is gone.

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
    make = getattr(distributed_c10d, _MAKER)

    @functools.wraps(make)
    def release_and_make(*args: Any, **kwargs: Any) -> Any:
        # Before it waits for peers: where a script makes its groups anew after an error, they may
        # be in the last one, and come once its connections are closed.
        release_backends_of_ended_groups()
        return make(*args, **kwargs)

    setattr(distributed_c10d, _MAKER, release_and_make)


# When Python ends it clears modules in no order that one could rely on: a model may go after the
# backends that are kept for it. And a thread that takes the GIL meanwhile is ended by Python in the
# middle of torch's code, which ends the process with SIGABRT (seen with Python 3.11).
_SETTLE_WITHIN_S = 5.0
# Who wants the GIL has had it by then.
_SETTLE_S = 0.02


@atexit.register  # while this is imported: what a script registers is dropped when it restarts
def leave_groups_to_the_kernel() -> None:
    """Have no backend freed from now on, and wait until torch's threads have left Python.

    The process is ending, and the kernel takes what they hold. NCCL's groups are ended as torch
    would do; what takes long there is left alone.
    """
    if _keeper is None:
        return
    kept = [each for backends in list(_kept.values()) for each in backends] + _backends()
    for backend in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
    if not kept or os.getpid() != _keeper:
        return
    deadline = time.monotonic() + _SETTLE_WITHIN_S
    watched = {
        g: [b for b in backends_of(g) if _has_watchdog(b)] for g in distributed_c10d._world.pg_map
    }
    groups = [group for group, found in watched.items() if found and _is_first_to_end(group)]
    if groups:
        backends = [backend for group in groups for backend in watched.pop(group)]
        _end_later(backends, groups).join(_SETTLE_WITHIN_S)
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

    torch waits in NCCL for a group's operations, with a lock held that the abort needs. A rank that
    has finished, and whose peer hangs before its last collectives, could not be restarted. What
    the abort has come to meanwhile is not ended again.
    """
    if not distributed.is_available():
        return
    shut_down = getattr(distributed.ProcessGroup, "shutdown", None)
    if shut_down is None:
        return  # up to torch 2.6 a group's end aborts its operations

    def wait_and_shut_down(group: Any) -> None:
        if any(map(_has_watchdog, backends_of(group))):
            with contextlib.suppress(RuntimeError):  # torch's second engine cannot
                group._wait_for_pending_works()
            if not _is_first_to_end(group):
                return
        shut_down(group)

    distributed.ProcessGroup.shutdown = wait_and_shut_down


def release_backends_of_ended_groups() -> None:
    """Drop the backends whose groups are gone; waits, without the GIL, for their threads to end.

    May be interrupted at any point and called again.
    """
    for group in list(_kept):
        if group() is None:
            _kept.pop(group, None)


_ending: list[threading.Thread] = []


@holds_a_lock  # of Python's, while it starts a thread
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
