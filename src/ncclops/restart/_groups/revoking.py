"""NCCL: the default group's communicator outlives a fault, revoked.

An abort frees a communicator. That of the group which is kept here is revoked instead: its
operations end, and others can still be made of it (``shrinking``, ``reconfiguring``). torch's first
engine has no function for that, and the second one's also writes the flight recorder, which takes
seconds: the library is called that torch uses.
"""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, distributed_c10d

from ncclops.restart._groups.backends import nccl_library
from ncclops.restart.regroup import NO_GROUP

log = logging.getLogger("ncclops.restart")

_SUCCESS, _IN_PROGRESS = 0, 7
_LOOK_EVERY_S = 0.001


@dataclass(eq=False)
class Revocable:
    """The default group that outlives the next fault: torch's objects, and the iteration it was
    made in.

    ``over``: the name space of its store, where it can be reconfigured; ``None``: it can be shrunk.
    ``is_revoked``: a fault has come, and another communicator can be made of its own.
    """

    group: Any
    backend: Any
    device: torch.device
    iteration: int
    timeout: timedelta
    over: str | None = None
    is_revoked: bool = False

    @property
    def place(self) -> tuple[int, int, int]:
        """What tells this rank's place in it: where it was made, the rank, the number of ranks."""
        return self.iteration, self.backend.rank(), self.backend.size()


_kept: Revocable | None = None
_lacks = NO_GROUP


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


def take() -> Revocable | None:
    """Keep no group any more: the one that has been revoked, and is to be ended. Main thread."""
    found = revoked()
    keep(None)
    return found


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
    failure = _revoke(kept)
    if failure is None:
        kept.is_revoked = True
        return True
    keep(None, f"could not revoke its communicator: {failure}")
    log.warning("this rank %s", _lacks)
    return False


def _revoke(kept: Revocable) -> str | None:
    """Why it has failed; ``None``: it has not."""
    nccl = nccl_library()
    torch.cuda.set_device(kept.device)  # of this thread: by it torch finds the communicator
    communicator = ctypes.c_void_p(kept.backend._comm_ptr())
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
