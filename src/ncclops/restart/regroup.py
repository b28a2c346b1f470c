"""How the default group of a function that keeps going comes to its members after a fault.

The rungs, from the cheapest. All ranks take the same one; what each can do is an ``Offer``, and
``plan_for`` decides for all. Values alone: ``_regrouping`` carries it out.

- *reconfigured*: the group that is there is given its new members and connections, and stays the
  same object for all that hold it. torch 2.14 and newer, Gloo.
- *anew*: the old group is ended, and another one is made. Always possible; also what follows where
  a reconfiguration has failed on any rank.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SINCE_TORCH = "2.14"
# torch wants another number for each reconfiguration of a group: those of iteration k are from
# k times this on. One iteration has a few at most.
RECONFIGURATIONS = 1000
# Where a reconfiguration is known to work. NCCL's first engine in torch has none.
_RECONFIGURES = frozenset({"gloo"})


class Rung(enum.Enum):
    """How a group has come to its members."""

    RECONFIGURED = "reconfigured"
    ANEW = "anew"


def why_not_in_place(
    backend: str, *, torch_version: str, has_reconfigure: bool, is_wrapped: bool
) -> str | None:
    """Why a group of ``backend`` cannot be reconfigured; ``None``: it can.

    ``has_reconfigure``: this torch has the functions. ``is_wrapped``: torch puts a wrapper around
    each backend (``TORCH_DISTRIBUTED_DEBUG=DETAIL``), which passes no reconfiguration on.
    """
    if not has_reconfigure:
        return f"torch {torch_version} cannot reconfigure groups, {SINCE_TORCH} and newer can"
    if backend.lower() not in _RECONFIGURES:
        return f"groups of {backend} are not reconfigured, only of {', '.join(_RECONFIGURES)}"
    if is_wrapped:
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around groups"
    return None


@dataclass(frozen=True)
class Offer:
    """What one rank brings.

    ``why_not``: why it can reconfigure no group; ``None``: it can. ``handle``: of its group of
    before the fault, by which torch reconfigures it; ``None``: it has none. ``goes_on``: the rank
    has its objects of before the fault.
    """

    why_not: str | None = None
    handle: str | None = None
    goes_on: bool = False

    def to_json(self) -> str:
        """As the store holds it."""
        return json.dumps([self.why_not, self.handle, self.goes_on])

    @classmethod
    def from_json(cls, text: str | bytes) -> Offer:
        """The inverse of ``to_json``."""
        return cls(*json.loads(text))


@dataclass(frozen=True)
class Plan:
    """What all ranks do.

    ``handles``, by rank: they reconfigure their groups with them; none: the group is made anew,
    for the reason ``why``, and so that it can be reconfigured later if ``can_later``.
    ``objects_stay``: every rank has its objects of before the fault.
    """

    handles: tuple[str, ...] = ()
    can_later: bool = False
    why: str | None = None
    objects_stay: bool = False

    def to_json(self) -> str:
        """As the store holds it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The inverse of ``to_json``."""
        fields = json.loads(text)
        return cls(**fields | {"handles": tuple(fields["handles"])})


def plan_for(offers: Sequence[Offer]) -> Plan:
    """What to do, from the offers of all ranks, in their order."""
    return dataclasses.replace(
        _plan_for_groups(offers), objects_stay=all(offer.goes_on for offer in offers)
    )


def _plan_for_groups(offers: Sequence[Offer]) -> Plan:
    for rank, offer in enumerate(offers):
        if offer.why_not is not None:
            return Plan(why=f"rank {rank}: {offer.why_not}")
    handles = tuple(offer.handle for offer in offers if offer.handle is not None)
    without = [rank for rank, offer in enumerate(offers) if offer.handle is None]
    if not handles:
        return Plan(can_later=True, why="no rank had a group")
    if without:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        return Plan(can_later=True, why=f"rank {without[0]}{more} had no group of before")
    if len(set(handles)) < len(handles):
        return Plan(can_later=True, why="two ranks have the same handle")
    return Plan(handles, can_later=True)


def failure_of(results: Sequence[str]) -> str | None:
    """Why a reconfiguration has failed, from what each rank says of its own; "": it is done."""
    reasons = [f"rank {rank}: {said}" for rank, said in enumerate(results) if said]
    if not reasons:
        return None
    return reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")


@dataclass(frozen=True)
class Regrouped:
    """How the default group has come to its ``world_size`` members, in ``iteration``.

    The same on every rank, but for ``ms``, the milliseconds that it took on this one. ``why`` it
    was made ``ANEW``; ``None``: it was not. ``objects_stay``: no rank is new, so that what holds
    the group can go on everywhere; where one is, it is made anew on all ranks, as what the new rank
    makes, such as DDP, talks to all others meanwhile.
    """

    iteration: int
    rung: Rung
    world_size: int
    ms: float
    why: str | None = None
    objects_stay: bool = False

    def renew(self, ddp: Any) -> None:
        """Have ``ddp``, a ``DistributedDataParallel`` over the default group, go on with that.

        On all ranks, if ``objects_stay``. Whatever the fault has interrupted its last backward pass
        in, the next forward pass begins anew.
        """
        from torch import distributed

        ddp._update_process_group(distributed.group.WORLD)

    def to_dict(self) -> dict[str, Any]:
        """As the incident has it."""
        return {
            "group": "default",
            "rung": self.rung.value,
            "why": self.why,
            "ms": round(self.ms, 3),
        }

    def __str__(self) -> str:
        size = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        if self.rung is Rung.ANEW:
            return f"the default group of {size} is made anew, in {self.ms:.0f} ms: {self.why}"
        return f"the default group goes on with {size}, reconfigured in {self.ms:.0f} ms"
