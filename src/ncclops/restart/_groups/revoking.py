"""NCCL: communicators that a fault revokes.

An abort frees a communicator. That of the group which is kept here is revoked instead: its
operations end, and others can still be made of it (``shrinking``, ``reconfiguring``), in a thread
that may be left. torch's first engine has no function to revoke one, and the second one's also
writes the flight recorder, which takes seconds: the library is called that torch uses. So are all
others of the second engine before their abort, which waits for the lock that torch holds in a call
of NCCL: also in one that waits.
"""

from __future__ import annotations

import abc
import ctypes
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, distributed_c10d

from ncclops.restart._groups.attempts import Attempt
from ncclops.restart._groups.backends import is_wrapped, nccl_library
from ncclops.restart.regroup import NO_GROUP

log = logging.getLogger("ncclops.restart")

_SUCCESS, _IN_PROGRESS = 0, 7
_LOOK_EVERY_S = 0.001


@dataclass(eq=False)
class Revocable(abc.ABC):
    """The default group that outlives the next fault: torch's objects, and the iteration it was
    made in.

    ``is_revoked``: a fault has come, and another communicator can be made of its own.
    """

    group: Any
    backend: Any
    device: torch.device
    iteration: int
    timeout: timedelta
    is_revoked: bool = False

    @abc.abstractmethod
    def end(self) -> None:
        """End it, which is out of torch's tables, with all that was made of it. Any thread."""


_kept: Revocable | None = None
_lacks = NO_GROUP
# What makes another communicator of that of a group.
_attempt: Attempt | None = None
# In which the store was made over which the group that is in use may have others made.
_store_made_in: int | None = None


def can_revoke() -> bool:
    """Whether the NCCL that torch uses has what is needed here."""
    return hasattr(nccl_library(), "ncclCommRevoke")


def keep(group: Revocable | None, lacks: str = NO_GROUP) -> None:
    """Have ``group``, torch's default group, outlive the next fault; ``None``: there is none, as
    this rank ``lacks`` it. Main thread."""
    global _kept, _lacks
    _kept, _lacks = group, lacks


def revoked() -> Revocable | None:
    """The group of which another communicator can be made now."""
    return _kept if _kept is not None and _kept.is_revoked else None


def lacks() -> str:
    """Why there is none."""
    return _lacks


def begin_to_change(
    group: Revocable, thread: str, act: Callable[[], object], report: Callable[[str], object]
) -> None:
    """Have ``act`` make another communicator of that of ``group``, in a thread of this name.

    ``report`` is called there with "", or with why it has failed on this rank. ``changed`` follows
    where all ranks have reported success, else ``give_up``. Main thread.
    """
    global _attempt
    keep(None)
    _attempt = Attempt(thread, act, report, group.end)


def changed(group: Revocable | None, lacks: str = NO_GROUP) -> None:
    """All ranks have done it; ``group`` is kept from now on, as by ``keep``. Main thread."""
    global _attempt
    _attempt = None
    keep(group, lacks)


def give_up() -> None:
    """End the group that is being changed, if one is, whatever has come of it. Main thread."""
    global _attempt
    attempt, _attempt = _attempt, None
    if attempt is not None:
        use_store_of(None)
        attempt.leave()


def end_kept() -> None:
    """End the group that was revoked, or is being changed; none is kept any more. Main thread."""
    give_up()
    use_store_of(None)
    group = revoked()
    keep(None)
    if group is not None:
        group.end()


def use_store_of(iteration: int | None) -> None:
    """Have the store of ``iteration`` stay as long as the group that is in use; ``None``: as others
    do. Main thread."""
    global _store_made_in
    _store_made_in = iteration


def store_in_use() -> int | None:
    """The iteration of which that is."""
    return _store_made_in


def conditions(device: torch.device | None) -> dict[str, Any]:
    """What decides whether a group of NCCL on ``device`` can be revoked, by its name in
    ``regroup``."""
    return {
        "torch_version": torch.__version__,
        "nccl_version": torch.cuda.nccl.version(),
        "has_device": device is not None,
        "is_wrapped": is_wrapped(),
        "watchdog_ends_groups": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0",
    }


def is_kept(backend: Any) -> bool:
    """Whether ``backend`` is that of the group that is kept. Any thread."""
    return _kept is not None and backend is _kept.backend


def revoke(backend: Any) -> bool:
    """Whether ``backend`` is the kept group's, and its operations have been ended without freeing
    its communicator. In the thread that aborts.
    """
    kept = _kept
    if kept is None or kept.is_revoked or backend is not kept.backend:
        return False
    torch.cuda.set_device(kept.device)  # of this thread: by it torch finds the communicator
    failure = _revoke(backend)
    if failure is None:
        kept.is_revoked = True
        return True
    keep(None, f"could not revoke its communicator: {failure}")
    log.warning("this rank %s", _lacks)
    return False


def end_operations(backend: Any) -> None:
    """End what a backend of torch's second engine does and waits for, without torch's lock."""
    if can_revoke() and (failure := _revoke(backend)) is not None:
        log.debug("the communicator of a group could not be revoked: %s", failure)


def _revoke(backend: Any) -> str | None:
    """Why it has failed; ``None``: it has not."""
    nccl = nccl_library()
    communicator = ctypes.c_void_p(backend._comm_ptr())
    if not communicator:
        return "torch has none"
    result = nccl.ncclCommRevoke(communicator, 0)
    while result == _IN_PROGRESS:  # one that is not blocking
        time.sleep(_LOOK_EVERY_S)
        state = ctypes.c_int()
        asked = nccl.ncclCommGetAsyncError(communicator, ctypes.byref(state))
        result = state.value if asked == _SUCCESS else asked
    return None if result == _SUCCESS else f"NCCL says {result}"


def put_into_tables(group: Any, name: str, store: Store) -> None:
    """Make ``group`` torch's default group, over ``store``, as torch does with one that it has
    made. In an atomic section."""
    world = distributed_c10d._world
    group._set_group_name(name)
    group._set_group_desc("default_pg")
    world.pg_map[group] = distributed_c10d.Backend.NCCL, store
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    config = distributed_c10d.BackendConfig("nccl")
    world.pg_backend_config[group] = str(config)
    tag = f"ptd:{name}"
    for each in ("", tag):
        world.tags_to_pg.setdefault(each, []).append(group)
    world.pg_to_tag[group] = tag
    distributed_c10d._register_process_group(name, group)
    distributed_c10d._update_default_pg(group)
