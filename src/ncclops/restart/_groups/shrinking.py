"""NCCL: the default group's communicator is shrunk to the ranks that are left after a fault.

Of torch's first engine. The new communicator belongs to a new group; its parent, which was revoked,
is aborted then, as the ranks that were lost do not take part in an orderly end (pytorch#194679).

A group that has come from another one is not shrunk again: it shares its parent's part of the
store, where the next one would find the addresses of its communicators for messages between two
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store, distributed_c10d

from ncclops.restart._groups import revoking
from ncclops.restart._groups.attempts import Attempt
from ncclops.restart._groups.revoking import Revocable

# Also ends what the communicator is doing, and shares none of its resources with the new one.
_SHRINK_ABORT = 1


@dataclass
class _Shrunk:
    """What is being made of ``parent``."""

    parent: Revocable
    child: Any = None


_shrunk: _Shrunk | None = None
_attempt: Attempt | None = None
# Where the store of the group is that is there, or of its parent.
_made_in: int | None = None


def can_shrink() -> bool:
    """Whether this torch, and the NCCL that it uses, have what is needed here."""
    group = getattr(distributed_c10d, "ProcessGroupNCCL", None)
    has_functions = all(hasattr(group, name) for name in ("shrink", "_comm_ptr"))
    return has_functions and revoking.can_revoke()


def keep(group: Any, device: torch.device, iteration: int) -> None:
    """Have ``group``, torch's default group, be shrunk after the next fault. Main thread."""
    global _made_in
    backend = group._get_backend(device)
    if type(backend) is not distributed_c10d.ProcessGroupNCCL:
        revoking.keep(None, f"has a group of {type(backend).__name__}, which is not shrunk")
        return
    revoking.keep(Revocable(group, backend, device, iteration, backend.options._timeout))
    _made_in = iteration


def store_in_use() -> int | None:
    """The iteration that the kept group was made in, or the one that has come from it."""
    return _made_in


def forget_store() -> None:
    """There is no such group any more. Main thread."""
    global _made_in
    _made_in = None


def begin_to_shrink(
    excluded: Sequence[int],
    report: Callable[[str], object],
    end: Callable[[Revocable, Any], object],
) -> None:
    """Have a communicator made of all ranks but ``excluded``.

    ``report`` is called with "", or with why it has failed on this rank, and ``end`` with a group
    and the backend that has come of it, or ``None``, once both are given up; each in any thread.
    ``adopt`` follows where all ranks have reported success, else ``give_up``. Main thread.
    """
    global _attempt, _shrunk
    parent = revoking.revoked()
    assert parent is not None
    shrunk = _shrunk = _Shrunk(parent)

    def shrink() -> None:
        torch.cuda.set_device(parent.device)
        shrunk.child = parent.backend.shrink(list(excluded), _SHRINK_ABORT, None)

    revoking.keep(None)
    _attempt = Attempt("ncclops-shrink", shrink, report, lambda: end(parent, shrunk.child))


def give_up() -> None:
    """End what ``begin_to_shrink`` has left, if anything. Main thread."""
    global _attempt, _shrunk
    attempt, _attempt, _shrunk = _attempt, None, None
    if attempt is not None:
        forget_store()
        attempt.leave()


def adopt(store: Store) -> Revocable:
    """Make the new communicator torch's default group, and return its parent, which is to be ended.

    Further groups are made over ``store``. In an atomic section.
    """
    global _attempt, _shrunk
    assert _shrunk is not None
    parent, child = _shrunk.parent, _shrunk.child
    child._set_default_timeout(parent.timeout)
    group = distributed.ProcessGroup(store, child.rank(), child.size())
    nccl = distributed.ProcessGroup.BackendType.NCCL
    group._set_default_backend(nccl)
    group.bound_device_id = parent.device
    group._register_backend(parent.device, nccl, child)
    # Not its parent's name, under which torch's flight recorder has the ranks of before.
    name = f"{distributed_c10d._process_group_name([], use_hashed_name=False)}-shrunk"
    revoking.put_into_tables(group, name, store)
    _attempt = _shrunk = None
    revoking.keep(None, "has a group that was shrunk already")
    return parent
