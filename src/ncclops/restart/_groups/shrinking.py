"""NCCL: the default group's communicator outlives a fault, and is shrunk to those that are left.

An abort frees a communicator. That of the group which is kept here is revoked instead: its
operations end, and others can still be made of it. torch 2.13 has no function for that, so the
library is called that torch uses. The new communicator belongs to a new group; its parent is
aborted then, as the ranks that were lost do not take part in an orderly end (pytorch#194679).

A group that has come from another one is not shrunk again: it shares its parent's part of the
store, where the next one would find the addresses of its communicators for messages between two
ranks.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store, distributed_c10d

from ncclops.restart._groups.backends import nccl_library
from ncclops.restart.log import logged
from ncclops.restart.raised import summarise
from ncclops.restart.regroup import NO_GROUP

log = logging.getLogger("ncclops.restart")

_SUCCESS, _IN_PROGRESS = 0, 7
_LOOK_EVERY_S = 0.001
# Also ends what the communicator is doing, and shares none of its resources with the new one.
_SHRINK_ABORT = 1


@dataclass(eq=False)
class Parent:
    """The default group that may be shrunk: torch's objects, and the iteration it was made in.

    ``is_revoked``: a fault has come, and its communicator can be shrunk.
    """

    group: Any
    backend: Any
    device: torch.device
    iteration: int
    timeout: timedelta
    is_revoked: bool = False

    @property
    def place(self) -> tuple[int, int, int]:
        """What tells this rank's place in it: where it was made, the rank, the number of ranks."""
        return self.iteration, self.backend.rank(), self.backend.size()


_parent: Parent | None = None
_lacks = NO_GROUP
_attempt: _Attempt | None = None
# Where the store of the group is that is there, or of its parent.
_made_in: int | None = None


def can_shrink() -> bool:
    """Whether this torch, and the NCCL that it uses, have what is needed here."""
    group = getattr(distributed_c10d, "ProcessGroupNCCL", None)
    has_functions = all(hasattr(group, name) for name in ("shrink", "_comm_ptr"))
    return has_functions and hasattr(nccl_library(), "ncclCommRevoke")


# --- the group that is kept -----------------------------------------------------------------------


def keep(group: Any, device: torch.device, iteration: int) -> None:
    """Have ``group``, torch's default group, be shrunk after the next fault. Main thread."""
    global _parent, _lacks, _made_in
    backend = group._get_backend(device)
    if type(backend) is not distributed_c10d.ProcessGroupNCCL:
        _lacks = f"has a group of {type(backend).__name__}, which is not shrunk"
        return
    timeout = backend.options._timeout
    _parent = Parent(group, backend, device, iteration, timeout)
    _lacks, _made_in = NO_GROUP, iteration


def revoked() -> Parent | None:
    """The group that can be shrunk now."""
    parent = _parent
    return parent if parent is not None and parent.is_revoked else None


def lacks() -> str:
    """Why there is none."""
    return _lacks


def store_in_use() -> int | None:
    """The iteration that the kept group was made in, or the one that has come from it."""
    return _made_in


def take() -> Parent | None:
    """Keep no group any more: the one that has been revoked, and is to be ended. Main thread."""
    global _parent, _lacks, _made_in
    parent, _parent = revoked(), None
    _lacks, _made_in = NO_GROUP, None
    return parent


def revoke(backend: Any) -> bool:
    """Whether ``backend`` is the kept group's, and its operations have been ended without freeing
    its communicator. In the thread that aborts.
    """
    global _parent, _lacks
    parent = _parent
    if parent is None or parent.is_revoked or backend is not parent.backend:
        return False
    failure = _revoke(parent)
    if failure is None:
        parent.is_revoked = True
        return True
    _parent, _lacks = None, f"could not revoke its communicator: {failure}"
    log.warning("this rank %s", _lacks)
    return False


def _revoke(parent: Parent) -> str | None:
    """Why it has failed; ``None``: it has not."""
    nccl = nccl_library()
    torch.cuda.set_device(parent.device)  # of this thread: by it torch finds the communicator
    communicator = ctypes.c_void_p(parent.backend._comm_ptr())
    if not communicator:
        return "torch has none"
    result = nccl.ncclCommRevoke(communicator, 0)
    while result == _IN_PROGRESS:  # one that is not blocking
        time.sleep(_LOOK_EVERY_S)
        state = ctypes.c_int()
        asked = nccl.ncclCommGetAsyncError(communicator, ctypes.byref(state))
        result = state.value if asked == _SUCCESS else asked
    return None if result == _SUCCESS else f"NCCL says {result}"


# --- shrinking ------------------------------------------------------------------------------------


class _Attempt:
    """Shrinks ``parent`` in a thread: NCCL cannot be interrupted in that.

    To abort the parent meanwhile would free what NCCL is working with. One that does not return in
    time is left alone, and what it has come to is handed to ``end`` whenever that is.
    """

    def __init__(
        self,
        parent: Parent,
        excluded: Sequence[int],
        report: Callable[[str], object],
        end: Callable[[Parent, Any], object],
    ) -> None:
        self.parent = parent
        self.child: Any = None
        self._excluded = list(excluded)
        self._report = report
        self._end = end
        self._lock = threading.Lock()
        self._is_left = self._has_returned = False
        threading.Thread(target=self._run, name="ncclops-shrink", daemon=True).start()

    def _run(self) -> None:
        failure = ""
        try:
            torch.cuda.set_device(self.parent.device)
            self.child = self.parent.backend.shrink(self._excluded, _SHRINK_ABORT, None)
        except Exception as error:  # noqa: BLE001 - torch's, or of the store that it connects to
            failure = summarise(error)
        with self._lock:
            self._has_returned = True
            is_left = self._is_left
        if is_left:
            self._end(self.parent, self.child)
        else:
            with logged("telling the other ranks how shrinking has ended"):
                self._report(failure)

    def leave(self) -> None:
        """Have what it has come to, or comes to, ended."""
        with self._lock:
            self._is_left = True
            has_returned = self._has_returned
        if has_returned:
            self._end(self.parent, self.child)


def begin_to_shrink(
    excluded: Sequence[int],
    report: Callable[[str], object],
    end: Callable[[Parent, Any], object],
) -> None:
    """Have a communicator made of all ranks but ``excluded``.

    ``report`` is called with "", or with why it has failed on this rank, and ``end`` with a group
    and the backend that has come of it, or ``None``, once both are given up; each in any thread.
    ``adopt`` follows where all ranks have reported success, else ``give_up``. Main thread.
    """
    global _attempt, _parent
    parent = _parent
    assert parent is not None and parent.is_revoked
    _attempt, _parent = _Attempt(parent, excluded, report, end), None


def give_up() -> None:
    """End what ``begin_to_shrink`` has left, if anything. Main thread."""
    global _attempt, _made_in
    attempt, _attempt = _attempt, None
    if attempt is not None:
        _made_in = None
        attempt.leave()


def adopt(store: Store) -> Parent:
    """Make the new communicator torch's default group, and return its parent, which is to be ended.

    Further groups are made over ``store``. In an atomic section.
    """
    global _attempt, _lacks
    attempt = _attempt
    assert attempt is not None
    parent, child = attempt.parent, attempt.child
    child._set_default_timeout(parent.timeout)
    group = distributed.ProcessGroup(store, child.rank(), child.size())
    nccl = distributed.ProcessGroup.BackendType.NCCL
    group._set_default_backend(nccl)
    group.bound_device_id = parent.device
    group._register_backend(parent.device, nccl, child)
    _put_into_tables(group, store)
    _attempt, _lacks = None, "has a group that was shrunk already"
    return parent


def _put_into_tables(group: Any, store: Store) -> None:
    """As torch does with a default group that it has made."""
    world = distributed_c10d._world
    # Not its parent's name, under which torch's flight recorder has the ranks of before.
    name = f"{distributed_c10d._process_group_name([], use_hashed_name=False)}-shrunk"
    group._set_group_name(name)
    group._set_group_desc("default_pg")
    world.pg_map[group] = distributed_c10d.Backend.NCCL, store
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    world.pg_backend_config[group] = str(distributed_c10d.BackendConfig("nccl"))
    tag = f"ptd:{name}"
    for each in ("", tag):
        world.tags_to_pg.setdefault(each, []).append(group)
    world.pg_to_tag[group] = tag
    distributed_c10d._register_process_group(name, group)
    distributed_c10d._update_default_pg(group)
