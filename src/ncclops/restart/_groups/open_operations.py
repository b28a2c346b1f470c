"""Groups of NCCL's operations that the main thread has begun and not ended: ``batch_isend_irecv``,
and whatever else is in torch's coalescing manager.

Between ``ncclGroupStart`` and ``ncclGroupEnd`` NCCL only collects what a thread calls, and torch
takes it for done at once. A thread that is taken out of the middle leaves the group open, and
nothing that it calls afterwards is ever sent or reduced: to end the group then would touch
communicators that the abort has freed. So a restart waits for the end of the group that the main
thread is in, and lets it begin no other. torch's second engine collects the operations itself and
begins the group at its end, in one call: there is none to be left open.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import distributed

from ncclops.restart._groups.backends import (
    backends_of,
    is_of_second_engine,
    nccl_library,
)
from ncclops.restart._interrupt.delicate import is_delicate
from ncclops.restart.exception import RankShouldRestart

# To collect operations takes milliseconds, as does to launch them at the end. What takes longer
# waits for a peer, which may be the one that has failed: for the communicator of the group's first
# operations, or, at the end, to be connected.
_END_WITHIN_S = 2.0
_LAUNCH_WITHIN_S = 0.1
_LOOK_EVERY_S = 0.001

# How many groups of operations the main thread has begun that it has not ended.
_open = 0
# Since when it has been ending one; infinite: it is not.
_ending_since = math.inf
# One of each restart that lets none begin. Calls of wrapped functions may be nested.
_restarts: set[object] = set()


@functools.cache
def watch_groups_of_operations() -> None:
    """Have the other functions know of them, for good."""
    if not distributed.is_available():
        return
    group: Any = distributed.ProcessGroup
    begin, end = group._start_coalescing, group._end_coalescing

    def counts(group: Any) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        return not any(map(is_of_second_engine, backends_of(group)))

    def begin_and_count(*arguments: Any, **keywords: Any) -> None:
        global _open
        _open += (own := counts(arguments[0]))
        try:
            # Counted before it looks; a restart says that it has begun, and then looks at the
            # count: one of them sees the other.
            if own and _restarts and _open == 1:
                raise RankShouldRestart("a restart has begun: no group of operations is begun")
            begin(*arguments, **keywords)
        except BaseException:  # also of a backend that has no such groups
            _open -= own
            raise

    @is_delicate
    def end_and_count(*arguments: Any, **keywords: Any) -> Any:
        global _open, _ending_since
        own = counts(arguments[0])
        if own:
            _ending_since = time.monotonic()
        try:
            work = end(*arguments, **keywords)
        except distributed.DistBackendError:  # NCCL has ended the group, with an error
            with contextlib.suppress(Exception):
                _have_torch_count_the_end(arguments[0])
                _open -= own
            raise
        finally:
            if own:
                _ending_since = math.inf
        _open -= own
        return work

    group._start_coalescing, group._end_coalescing = begin_and_count, end_and_count


def _have_torch_count_the_end(group: Any) -> None:
    """After NCCL has ended the calling thread's group of operations with an error.

    That is what an abort makes of one that waits for a peer. torch counts the groups that a thread
    is in, lowers the count only where NCCL returns no error, and otherwise ends one that is not
    there before it makes the next communicator. So a group without operations is begun in NCCL
    alone, and ended through torch. Raises where this torch has no way to do that.
    """
    backend = next(each for each in backends_of(group) if hasattr(each, "_group_end"))
    nccl_library().ncclGroupStart()
    backend._group_end()


def operations_are_open() -> bool:
    """Whether the main thread is in a group of operations, or was taken out of the middle."""
    return _open > 0


@contextlib.contextmanager
def no_group_of_operations(is_out: Callable[[], bool]) -> Iterator[None]:
    """While inside, the main thread begins none, and leaves the function instead.

    Waits first until it has ended the one that it is in, waits for a peer in that, or ``is_out`` of
    the function; for two seconds at most. Any other thread.
    """
    restart = object()
    _restarts.add(restart)
    try:
        ends_at = time.monotonic() + _END_WITHIN_S
        while operations_are_open() and not is_out():
            if time.monotonic() > min(ends_at, _ending_since + _LAUNCH_WITHIN_S):
                break
            time.sleep(_LOOK_EVERY_S)  # the main thread should lose no time over announcing it
        yield
    finally:
        _restarts.discard(restart)
