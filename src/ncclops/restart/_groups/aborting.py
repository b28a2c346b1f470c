"""The abort of all process groups, and nothing left of them for the next iteration."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from ncclops.restart._groups import kept_default, revoking
from ncclops.restart._groups.backends import (
    all_backends,
    backends_in_the_making,
    backends_of,
    has_watchdog,
    is_making_nccl,
    is_of_second_engine,
)
from ncclops.restart._groups.ending import end_groups_in_a_thread, end_later, is_first_to_end
from ncclops.restart._groups.gloo_sockets import release_gloo_connections
from ncclops.restart._groups.recorder import forget_ended
from ncclops.restart._groups.tables import empty_tables
from ncclops.restart._interrupt.other_threads import makers_of_groups
from ncclops.restart.log import logged

# What the abort of an NCCL backend is called, newest torch first.
_ABORT_NAMES = ("abort", "_abort", "_shutdown")

# What is to happen before an abort ends waits of the main thread without an error. Set in the
# thread that aborts.
before_silent_ends: ContextVar[Callable[[], object]] = ContextVar(
    "before_silent_ends", default=lambda: None
)


def forget_failed_groups() -> None:
    """Leave nothing of the last iteration's groups, now that all ranks are out of it.

    A group that was completed just after the abort had looked for it is aborted now. Gloo's
    connections are closed. torch's tables are emptied whatever is in them: where the making or the
    end of a group was interrupted they hold half of it, the name is taken for ever, and the rank
    would look for its peers under other names than they use, as torch numbers groups by a counter.
    The one that outlives restarts (``_groups.kept_default``, ``_groups.revoking``) stays.
    """
    abort_groups()
    revoking.give_up()
    end_groups_in_a_thread()
    release_gloo_connections()
    empty_tables()
    _hooks.clear()
    makers_of_groups.clear()
    forget_ended()


def abort_groups(main_thread: FrameType | None = None) -> None:
    """Abort the groups there are, and destroy them.

    Also those that the main thread is just making, where its present frame is given: torch
    connects some before they are in its tables, and waits in that for peers.
    """
    group, groups = distributed.group.WORLD, list(distributed_c10d._world.pg_map)
    backends = all_backends() + backends_in_the_making(main_thread)
    watched = [backend for backend in backends if has_watchdog(backend)]
    to_end = [each for each in groups if is_first_to_end(each)]
    ending = [b for each in groups if each not in to_end for b in backends_of(each)]
    backends = [b for b in backends if not (has_watchdog(b) and b in ending)]
    global aborted_nccl, _members
    aborted_nccl = bool(watched) or is_making_nccl(main_thread)
    ranks = distributed_c10d._world.pg_group_ranks
    _members = {id(each): frozenset(ranks[each]) for each in groups if each in ranks}
    if watched:
        # The abort ends a wait for the device without an error, and the main thread goes on: it
        # must not find these groups, as destroy_process_group() would end them, too, and hang.
        _hooks.extend(getattr(distributed_c10d._world, "pg_flight_recorder_hooks", {}).values())
        empty_tables()
        before_silent_ends.get()()
    freeing = _abort(backends)
    if not any(map(is_making_nccl, sys._current_frames().values())):
        freeing.join()  # else it waits for those who do not come
    # An abort that took too long was given up; the groups there are now are not its own.
    if not watched and distributed.is_initialized() and distributed.group.WORLD is group:
        with logged("destroy_process_group"):
            if kept_default.is_kept(group):
                kept_default.end_others()
            else:
                distributed.destroy_process_group()
    if watched:
        kept = revoking.revoked()
        ended = [b for b in backends if has_watchdog(b) and (kept is None or b is not kept.backend)]
        to_end = [each for each in to_end if kept is None or each is not kept.group]
        end_later(ended, to_end, before=freeing.join)


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


def abort_later(backends: list[Any], groups: list[Any]) -> None:
    """Abort ``backends``, of which no operation is waited for, and end ``groups``. Any thread."""
    end_later(backends, groups, before=lambda: _abort(backends).join())


def _abort(backends: list[Any]) -> threading.Thread:
    """Abort all backends at once: one may wait for another's peers.

    Those of torch's second engine of NCCL have only ended their operations then; the thread frees
    their communicators, one after the other as torch holds one lock in each call of NCCL.
    """
    second = [b for b in backends if is_of_second_engine(b) and not revoking.is_kept(b)]
    threads = [
        threading.Thread(
            target=_end_operations if backend in second else _abort_backend,
            args=(backend,),
            daemon=True,
        )
        for backend in backends
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    freeing = threading.Thread(target=lambda: [*map(_abort_backend, second)], daemon=True)
    freeing.start()
    return freeing


def _end_operations(backend: Any) -> None:
    with logged(f"ending the operations of {type(backend).__name__}"):
        revoking.end_operations(backend)


def _abort_backend(backend: Any) -> None:
    with logged(f"revoking {type(backend).__name__}"):
        if revoking.revoke(backend):
            return
    abort = next((getattr(backend, n) for n in _ABORT_NAMES if hasattr(backend, n)), None)
    if abort is not None:
        with logged(f"aborting {type(backend).__name__}"):
            abort()
