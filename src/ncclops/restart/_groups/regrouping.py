"""Carries out what ``regroup`` decides: the default group comes to the members of an iteration.

Keys, below a prefix that each time has of its own in the present iteration:

=====================  =========================================================================
``offer/<rank>``       what a rank brings (``regroup.Offer``)
``plan``               what all do, from rank 0 (``regroup.Plan``)
``handle/<rank>``      by which torch reconfigures a group that has just been made, or one of NCCL,
                       and the list of all from rank 0: ``handles``
``<try>/done/<rank>``  "", or why the reconfiguration has failed on a rank
``<try>/failed``       from rank 0: "", or why it counts as failed, on all ranks
``<try>/count``        of what NCCL does in threads: how many ranks have succeeded
``<try>/verdict``      of the first rank to know: that all have, or why it counts as failed
``meets/<rank>``       after that has failed, before one is made in the main thread; from rank 0:
                       ``met``
=====================  =========================================================================
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch import distributed

from ncclops.restart._groups import advised, kept_default, revoking
from ncclops.restart._groups.in_place import InPlace
from ncclops.restart._groups.members import Members
from ncclops.restart._groups.reconfiguring import Reconfiguring
from ncclops.restart._groups.shrinking import Shrinking
from ncclops.restart.regroup import Offer, Plan, Regrouped, Rung, plan_for

if TYPE_CHECKING:
    from ncclops.restart.session import Session


class Way(Protocol):
    """How the members of a group that is there come to be others, and groups are made for it."""

    rung: Rung
    name: str

    def offer(self) -> Offer:
        """What this rank brings: the group that it has, or why it has none."""

    def bring(self, plan: Plan) -> str | None:
        """Bring the group to its members, on all ranks or none: why none, or ``None``."""

    def make_for_later(self) -> bool:
        """Make a group anew that can be brought to others after the next fault, unless it turns out
        that it cannot: whether it has been made, the same on all ranks."""


def regroup(
    session: Session,
    backend: str,
    timeout: timedelta | None,
    within: timedelta,
    device_id: torch.device | None,
    *,
    rank: int,
    world_size: int,
    goes_on: bool,
    shrink: bool = False,
    reconfigure: bool | None = None,
) -> Regrouped:
    """Bring the default group to the members there are, on all of them.

    ``shrink``: groups of NCCL are to be shrunk. ``reconfigure``: groups are to be reconfigured;
    ``None``: of Gloo they are. ``goes_on``: this rank has its objects of before the fault. The
    rest is as in ``Members``.

    Raises ``ValueError`` where a group of NCCL is to be shrunk and to be reconfigured, and what
    torch raises where no group can be made.
    """
    is_nccl = "nccl" in backend.lower()
    if is_nccl and shrink and reconfigure:
        raise ValueError("a group of NCCL is shrunk or reconfigured: give one of the two")
    began = time.monotonic()
    members = Members(session, backend, timeout, within, device_id, rank, world_size)
    way: Way
    has_nccl = distributed.is_nccl_available()  # if not, making a group says so
    if shrink and is_nccl and has_nccl:
        way = Shrinking(members)
    elif reconfigure and backend.lower() == "nccl" and has_nccl:
        way = Reconfiguring(members)
    else:
        way = InPlace(members, reconfigure)
    offer = way.offer()
    why_not = offer.why_not or advised.ruled_out_here().get(way.rung)
    offer = replace(offer, why_not=why_not, goes_on=goes_on, way=way.name)
    plan = Plan.from_json(members.decided("offer", "plan", offer.to_json(), _plan_for))
    rung, why = way.rung, plan.why
    if why is None and (failure := way.bring(plan)) is not None:
        why = f"{way.name} failed: {failure}"
        members.warn("a group is made anew: %s", why)
    if why is not None:
        rung = Rung.ANEW
        kept_default.end()
        revoking.end_kept()
        if not (plan.can_later and way.make_for_later()):
            members.make("once", members.store)
    session.group_is_made()
    return Regrouped(
        iteration=session.iteration,
        rung=rung,
        world_size=world_size,
        ms=1000 * (time.monotonic() - began),
        why=why,
        objects_stay=plan.objects_stay,
    )


def _plan_for(said: Sequence[bytes]) -> str:
    return plan_for([Offer.from_json(text) for text in said]).to_json()
