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

import contextlib
import os
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed import Store, distributed_c10d

from ncclops.restart._groups import kept_default, revoking
from ncclops.restart._groups.aborting import abort_later
from ncclops.restart._groups.ending import goes_on, is_first_to_end
from ncclops.restart._groups.in_place import agreed_handles, has_reconfigure
from ncclops.restart._groups.members import Members
from ncclops.restart._groups.revoking import Revocable
from ncclops.restart._groups.tables import empty_tables
from ncclops.restart.regroup import (
    GROWS,
    RECONFIGURATIONS,
    SINCE_TORCH_OF_NCCL,
    Offer,
    Plan,
    Rung,
    why_nccl_not_in_place,
)
from ncclops.versions import satisfies

# Whether the group that is being made is to join one of the others', who make none.
is_joining: ContextVar[bool] = ContextVar("is_joining", default=False)

_communicators: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


@dataclass(eq=False)
class Reconfigurable(Revocable):
    """``over``: the name space of its store."""

    over: str = ""

    def end(self) -> None:
        self.backend.options.enable_reconfigure = False  # an abort only revokes with it
        is_first_to_end(self.group)
        abort_later([self.backend], [self.group])


class Reconfiguring:
    rung = Rung.RECONFIGURED
    name = "the reconfiguration"

    def __init__(self, members: Members) -> None:
        self._members = members

    def offer(self) -> Offer:
        has_second_engine = has_reconfigure() and _has_second_engine()
        why_not = why_nccl_not_in_place(
            has_second_engine=has_second_engine,
            is_second_engine=has_second_engine and _is_second_engine(),
            **revoking.conditions(self._members.device_id),
        )
        kept = _kept()
        return Offer(
            why_not,
            over=None if why_not is not None or kept is None else kept.over,
            grows=_shrinks_and_grows(),
            lacks=revoking.lacks(),
        )

    def bring(self, plan: Plan) -> str | None:
        assert plan.over is not None
        group = _kept()
        if group is None:
            revoking.end_kept()
            group = self._make(plan.over, others_have_it=True)
        return self._reconfigure(group)

    def make_for_later(self) -> bool:
        # Also after a reconfiguration has failed, as a rank may have died in it: what waits for
        # that one in a thread can be left, and what follows cannot.
        name = self._members.session.name_for_kept_group()
        failure = self._reconfigure(self._make(name, others_have_it=False))
        if failure is None:
            return True
        self._members.warn("a group that was made is not reconfigured: %s", failure)
        revoking.end_kept()
        self._members.decided("meets", "met", "", lambda _: "")
        return False

    def _make(self, over: str, *, others_have_it: bool) -> Reconfigurable:
        """A group over the store's name space ``over``, without a communicator, which is out of
        torch's tables. ``others_have_it``: they make none."""
        members, device = self._members, self._members.device_id
        assert device is not None
        kept_default.begin()
        is_joining.set(others_have_it)
        try:
            store = members.session.store_for_kept_group(over)
            members.make("later", store, enable_reconfigure=True)
        finally:
            is_joining.set(False)
        group = distributed.group.WORLD
        backend = group._get_backend(device)
        empty_tables()
        timeout = backend.options._timeout
        return Reconfigurable(group, backend, device, members.session.iteration, timeout, over=over)

    def _reconfigure(self, group: Reconfigurable) -> str | None:
        """Have ``group`` get a communicator of all members, and make it torch's default group."""
        members = self._members
        # Never again the same one among those that use the group's store.
        number = members.session.iteration * RECONFIGURATIONS + members.tries
        handles = agreed_handles(members, group.group, f"{members.tries}/handle")

        def reconfigure() -> None:
            torch.cuda.set_device(group.device)
            options = group.backend.options
            options.enable_reconfigure = True
            distributed_c10d._reconfigure(
                number, handles, group=group.group, timeout=members.within
            ).wait()
            options.enable_reconfigure = False

        # A batch of messages that the fault has cut would collect all later ones. None is sent now.
        with contextlib.suppress(RuntimeError):
            group.group._end_coalescing(group.device)
        failure = members.all_have(
            lambda report: revoking.begin_to_change(
                group, "ncclops-reconfigure", reconfigure, report
            )
        )
        if failure is None:
            with members.session.interrupter.atomic():
                _adopt(group, members.store)
        return failure


def _kept() -> Reconfigurable | None:
    """The group that gets another communicator, if this rank has one."""
    kept = None if kept_default.is_cut() else revoking.revoked()
    return kept if isinstance(kept, Reconfigurable) else None


def _adopt(kept: Reconfigurable, store: Store) -> None:
    """Make it torch's default group again, which outlives the next fault as well.

    Further groups are made over ``store``. In an atomic section.
    """
    group = kept.group
    revoking.put_into_tables(group, group.group_name, store)
    kept_default.note_members(group, store)
    attach = getattr(distributed_c10d, "_maybe_attach_flight_recorder", None)
    if attach is not None:  # with the ranks of now
        attach(group, distributed_c10d.BackendConfig("nccl"), list(range(group.size())))
    distributed_c10d.set_timeout(kept.timeout, group)  # it may be shorter by now
    _communicators[group] = communicators_of(group) + 1
    goes_on(group)
    kept.is_revoked = False
    revoking.changed(kept)


def communicators_of(group: Any) -> int:
    """How many communicators ``group`` has been given here."""
    return _communicators.get(group, 0)


def _has_second_engine() -> bool:
    """Whether this torch has the engine of NCCL that can be reconfigured."""
    return satisfies(torch.__version__, f">={SINCE_TORCH_OF_NCCL}")


def _is_second_engine() -> bool:
    """Whether groups of ``nccl`` are made by it, as variables of torch can say otherwise."""
    if distributed_c10d._use_torchcomms_enabled():
        return False
    distributed_c10d.Backend._ensure_backend_registered("nccl")
    creator = distributed_c10d.Backend._plugins["NCCL"].creator_fn
    return bool(creator is distributed_c10d._create_nccl2_process_group)


def _shrinks_and_grows() -> bool:
    """Whether torch is to make the new communicator of the one that is there, where it can."""
    return os.environ.get(GROWS) == "1"
