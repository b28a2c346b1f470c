"""NCCL: the default group gets a communicator of the ranks that there are, and stays one object.

Of torch's second engine, by its ``_reconfigure``. Between the fault and the new communicator the
group is out of torch's tables: its communicator is revoked (``revoking``), and no abort may meet it
while torch works with it in a thread. A rank that has no such group makes one, over the store of
the others', which has no communicator before it is reconfigured.

``enable_reconfigure`` of the backend's options is put back to ``False`` while the group is in use.
With it, torch's watchdog revokes a communicator that has an error, whatever
``TORCH_NCCL_ASYNC_ERROR_HANDLING`` says: waits for the device then end without an error, and a step
goes on with what no collective has computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed import Store, distributed_c10d

from ncclops.restart._groups import kept_default, revoking
from ncclops.restart._groups.attempts import Attempt
from ncclops.restart._groups.ending import goes_on
from ncclops.restart._groups.revoking import Revocable
from ncclops.restart._groups.tables import empty_tables
from ncclops.restart.regroup import GROWS, SINCE_TORCH_OF_NCCL
from ncclops.versions import satisfies

# Whether the group that is being made is to join one of the others', who make none.
is_joining: ContextVar[bool] = ContextVar("is_joining", default=False)

_attempt: Attempt | None = None
_group: Revocable | None = None  # of the attempt
_communicators: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def has_second_engine() -> bool:
    """Whether this torch has the engine of NCCL that can be reconfigured."""
    return satisfies(torch.__version__, f">={SINCE_TORCH_OF_NCCL}")


def is_second_engine() -> bool:
    """Whether groups of ``nccl`` are made by it, as variables of torch can say otherwise."""
    if distributed_c10d._use_torchcomms_enabled():
        return False
    distributed_c10d.Backend._ensure_backend_registered("nccl")
    creator = distributed_c10d.Backend._plugins["NCCL"].creator_fn
    return bool(creator is distributed_c10d._create_nccl2_process_group)


def shrinks_and_grows() -> bool:
    """Whether torch is to make the new communicator of the one that is there, where it can."""
    return os.environ.get(GROWS) == "1"


def communicators_of(group: Any) -> int:
    """How many communicators ``group`` has been given here."""
    return _communicators.get(group, 0)


def made(device: torch.device, iteration: int, over: str) -> Revocable:
    """torch's default group, which has just been made with ``enable_reconfigure``, over the store's
    name space ``over``. It is taken out of torch's tables. Main thread."""
    group = distributed.group.WORLD
    backend = group._get_backend(device)
    empty_tables()
    return Revocable(group, backend, device, iteration, backend.options._timeout, over)


def begin(
    group: Revocable,
    number: int,
    handles: Sequence[str],
    within: timedelta,
    report: Callable[[str], object],
    end: Callable[[Revocable], object],
) -> None:
    """Have ``group`` get a communicator of the ranks with ``handles``, in their order.

    ``number`` tells this time from all others. ``report`` is called with "", or with why it has
    failed on this rank, and ``end`` with the group once it is given up; each in any thread.
    ``adopt`` follows where all ranks have reported success, else ``give_up``. Main thread.
    """
    global _attempt, _group

    def reconfigure() -> None:
        torch.cuda.set_device(group.device)
        options = group.backend.options
        options.enable_reconfigure = True
        distributed_c10d._reconfigure(
            number, list(handles), group=group.group, timeout=within
        ).wait()
        options.enable_reconfigure = False

    revoking.keep(None)
    _group = group
    _attempt = Attempt("ncclops-reconfigure", reconfigure, report, lambda: end(group))


def give_up() -> None:
    """End what ``begin`` has left, if anything. Main thread."""
    global _attempt, _group
    attempt, _attempt, _group = _attempt, None, None
    if attempt is not None:
        attempt.leave()


def adopt(store: Store) -> None:
    """Make the group torch's default group again, which outlives the next fault as well.

    Further groups are made over ``store``. In an atomic section.
    """
    global _attempt, _group
    found = _group
    assert found is not None
    group = found.group
    revoking.put_into_tables(group, group.group_name, store)
    kept_default.note_members(group, store)
    attach = getattr(distributed_c10d, "_maybe_attach_flight_recorder", None)
    if attach is not None:  # with the ranks of now
        attach(group, distributed_c10d.BackendConfig("nccl"), list(range(group.size())))
    distributed_c10d.set_timeout(found.timeout, group)  # it may be shorter by now
    _communicators[group] = communicators_of(group) + 1
    goes_on(group)
    found.is_revoked = False
    revoking.keep(found)
    _attempt = _group = None
