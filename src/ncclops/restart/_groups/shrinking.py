"""NCCL: the default group's communicator is shrunk to the ranks that are left after a fault.

Of torch's first engine. The new communicator belongs to a new group; its parent, which was revoked,
is aborted then, as the ranks that were lost do not take part in an orderly end (pytorch#194679).

A group that has come from another one is not shrunk again: it shares its parent's part of the
store, where the next one would find the addresses of its communicators for messages between two
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from ncclops.restart._groups import revoking
from ncclops.restart._groups.aborting import abort_later
from ncclops.restart._groups.members import Members
from ncclops.restart._groups.revoking import Revocable
from ncclops.restart.regroup import Offer, Plan, Rung, why_not_shrunk

# Also ends what the communicator is doing, and shares none of its resources with the new one.
_SHRINK_ABORT = 1


@dataclass(eq=False)
class Shrinkable(Revocable):
    """``child``: the backend that has come of its communicator."""

    child: Any = None

    @property
    def place(self) -> tuple[int, int, int]:
        """What tells this rank's place in it: where it was made, the rank, the number of ranks."""
        return self.iteration, self.backend.rank(), self.backend.size()

    def end(self) -> None:
        backends = [each for each in (self.child, self.backend) if each is not None]
        abort_later(backends, [self.group])


class Shrinking:
    rung = Rung.SHRUNK
    name = "shrinking"

    def __init__(self, members: Members) -> None:
        self._members = members

    def offer(self) -> Offer:
        why_not = why_not_shrunk(
            self._members.backend,
            can_shrink=_can_shrink(),
            **revoking.conditions(self._members.device_id),
        )
        parent = revoking.revoked()
        place = parent.place if isinstance(parent, Shrinkable) else None
        return Offer(why_not, place=place, lacks=revoking.lacks())

    def bring(self, plan: Plan) -> str | None:
        parent = revoking.revoked()
        assert isinstance(parent, Shrinkable)

        def shrink() -> None:
            torch.cuda.set_device(parent.device)
            parent.child = parent.backend.shrink(list(plan.excluded), _SHRINK_ABORT, None)

        failure = self._members.all_have(
            lambda report: revoking.begin_to_change(parent, "ncclops-shrink", shrink, report)
        )
        if failure is None:
            with self._members.session.interrupter.atomic():
                self._adopt(parent)
        return failure

    def _adopt(self, parent: Shrinkable) -> None:
        """Make the new communicator torch's default group. In an atomic section."""
        store = distributed.PrefixStore("shrunk", self._members.store)
        child, parent.child = parent.child, None
        child._set_default_timeout(parent.timeout)
        group = distributed.ProcessGroup(store, child.rank(), child.size())
        nccl = distributed.ProcessGroup.BackendType.NCCL
        group._set_default_backend(nccl)
        group.bound_device_id = parent.device
        group._register_backend(parent.device, nccl, child)
        # Not its parent's name, under which torch's flight recorder has the ranks of before.
        name = f"{distributed_c10d._process_group_name([], use_hashed_name=False)}-shrunk"
        revoking.put_into_tables(group, name, store)
        revoking.changed(None, "has a group that was shrunk already")
        parent.end()

    def make_for_later(self) -> bool:
        members, session = self._members, self._members.session
        store = session.store_for_shrinkable_group()
        store.set_timeout(members.store_timeout)
        members.make("once", store)
        group, device = distributed.group.WORLD, members.device_id
        assert device is not None
        backend = group._get_backend(device)
        if type(backend) is distributed_c10d.ProcessGroupNCCL:
            timeout = backend.options._timeout
            revoking.keep(Shrinkable(group, backend, device, session.iteration, timeout))
            revoking.use_store_of(session.iteration)
        else:
            revoking.keep(None, f"has a group of {type(backend).__name__}, which is not shrunk")
        return True


def _can_shrink() -> bool:
    """Whether this torch, and the NCCL that it uses, have what is needed here."""
    group = getattr(distributed_c10d, "ProcessGroupNCCL", None)
    has_functions = all(hasattr(group, name) for name in ("shrink", "_comm_ptr"))
    return has_functions and revoking.can_revoke()
