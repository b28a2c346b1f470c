"""How the default group of a function that keeps going comes to its members after a fault.

The rungs, from the cheapest. All ranks take the same one; what each can do is an ``Offer``, and
``plan_for`` decides for all. Values alone: ``_groups.regrouping`` carries it out.

- *reconfigured*: the group that is there is given its new members and connections, and stays the
  same object for all that hold it. torch 2.14 and newer, Gloo; torch's second NCCL engine, of 2.15,
  where it is asked for: there ranks that have no group make one that joins.
- *shrunk*: another group is made of the communicator that is there, without the ranks that were
  lost. NCCL, where it is asked for.
- *anew*: the old group is ended, and another one is made. Always possible; also what follows where
  one of the others has failed on any rank.

Groups beside the default one are *kept*, which ``which_to_keep`` decides, or made anew.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

SINCE_TORCH, SINCE_TORCH_OF_NCCL = "2.14", "2.15"
# torch wants another number for each reconfiguration of a group: those of iteration k are from
# k times this on. One iteration has a few at most.
RECONFIGURATIONS = 1000
# From this NCCL on, what a communicator is doing can be ended without freeing it.
_REVOKES = (2, 28, 7)
# By this torch makes the new communicator of the one that is there, where it can.
GROWS = "TORCH_NCCL2_RECONFIGURE_SHRINK_GROW"
NO_GROUP = "had no group of before"
LOST_CONNECTION = "a connection of it was lost"
_WRAPPED = "TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around groups"


class Rung(enum.Enum):
    """How a group has come to its members."""

    RECONFIGURED = "reconfigured"
    SHRUNK = "shrunk"
    KEPT = "kept"
    ANEW = "anew"


def why_not_in_place(
    backend: str,
    *,
    torch_version: str,
    has_reconfigure: bool,
    is_wrapped: bool,
    is_asked_for: bool | None = None,
) -> str | None:
    """Why a group of ``backend`` is not reconfigured, unless it is one of NCCL for which that is
    asked; ``None``: it can be.

    ``has_reconfigure``: this torch has the functions. ``is_wrapped``: torch puts a wrapper around
    each backend (``TORCH_DISTRIBUTED_DEBUG=DETAIL``), which passes no reconfiguration on.
    ``is_asked_for``, or ruled out, with ``reconfigure=``; ``None``: neither.
    """
    if is_asked_for is False:
        return "reconfigure=False"
    if not has_reconfigure:
        return f"torch {torch_version} cannot reconfigure groups, {SINCE_TORCH} and newer can"
    if is_asked_for is None and backend.lower() == "nccl":
        return "groups of nccl are reconfigured only with reconfigure=True"
    if backend.lower() != "gloo":
        return f"groups of {backend} are not reconfigured, only of gloo and of nccl"
    return _WRAPPED if is_wrapped else None


def why_nccl_not_in_place(
    *,
    torch_version: str,
    has_second_engine: bool,
    is_second_engine: bool,
    nccl_version: tuple[int, ...],
    has_device: bool,
    is_wrapped: bool,
    watchdog_ends_groups: bool,
) -> str | None:
    """Why a group of NCCL cannot be reconfigured; ``None``: it can.

    ``has_second_engine``: this torch has the one that can be, and ``is_second_engine``: groups are
    made by that, which ``TORCH_DIST_USE_NCCL2`` may change. The rest is as in ``why_not_shrunk``.
    """
    if not has_second_engine:
        since = SINCE_TORCH_OF_NCCL
        return f"torch {torch_version} cannot reconfigure groups of NCCL, {since} and newer can"
    if not is_second_engine:
        return (
            "groups are not of torch's second NCCL engine: TORCH_DIST_USE_NCCL2 is 0, or the like"
        )
    return _why_not_revoked(nccl_version, has_device, is_wrapped, watchdog_ends_groups)


def why_not_shrunk(
    backend: str,
    *,
    torch_version: str,
    can_shrink: bool,
    nccl_version: tuple[int, ...],
    has_device: bool,
    is_wrapped: bool,
    watchdog_ends_groups: bool,
) -> str | None:
    """Why a group of ``backend`` cannot be shrunk; ``None``: it can.

    ``can_shrink``: this torch and its NCCL have the functions. ``has_device``: the group is made
    with ``device_id``. ``watchdog_ends_groups``: torch's watchdog may abort a communicator.
    """
    if backend.lower() != "nccl":
        return f"groups of {backend} are not shrunk, only of nccl"
    if nccl_version >= _REVOKES and not can_shrink:
        return f"torch {torch_version} cannot shrink groups of its NCCL"
    return _why_not_revoked(nccl_version, has_device, is_wrapped, watchdog_ends_groups)


def _why_not_revoked(
    nccl_version: tuple[int, ...], has_device: bool, is_wrapped: bool, watchdog_ends_groups: bool
) -> str | None:
    if nccl_version < _REVOKES:
        version, since = (".".join(map(str, each)) for each in (nccl_version, _REVOKES))
        return f"NCCL {version} cannot revoke communicators, {since} and newer can"
    if not has_device:
        return "without device_id a group has no communicator of its own from the start"
    if watchdog_ends_groups:
        return "torch's watchdog may abort communicators: TORCH_NCCL_ASYNC_ERROR_HANDLING is not 0"
    return _WRAPPED if is_wrapped else None


def why_never_kept(backend: str, *, is_wrapped: bool, all_meet: bool) -> str | None:
    """Why no group of ``backend`` is kept, beside the default one; ``None``: it may be.

    ``all_meet``: all ranks wait for each other whenever a group is made.
    """
    if all_meet:
        return "TORCH_DIST_INIT_BARRIER=1 has ranks that are no members wait for it"
    if backend.lower() not in ("gloo", "nccl"):
        return f"groups of {backend} are not kept, only of gloo and of nccl"
    return _WRAPPED if is_wrapped else None


@dataclass(frozen=True)
class Offer:
    """What one rank brings.

    ``why_not``: why it can reconfigure or shrink no group; ``None``: it can. Of its group of before
    the fault it has one or none of: ``handle``, by which torch reconfigures it; ``place``, where it
    can be shrunk: in which iteration it was made, the rank in it, and the number of ranks;
    ``over``, where it is one of NCCL that can be reconfigured: the name space of its store. None:
    ``lacks`` says why. ``grows``: torch is to shrink and to grow its communicator. ``goes_on``: the
    rank has its objects of before the fault, all of them. ``way``: what it was asked to do.
    """

    why_not: str | None = None
    handle: str | None = None
    goes_on: bool = False
    place: tuple[int, int, int] | None = None
    lacks: str = NO_GROUP
    over: str | None = None
    grows: bool = False
    way: str = ""

    def to_json(self) -> str:
        """As the store holds it."""
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Offer:
        """The inverse of ``to_json``."""
        why_not, handle, goes_on, place, *rest = json.loads(text)
        return cls(why_not, handle, goes_on, None if place is None else tuple(place), *rest)


@dataclass(frozen=True)
class Plan:
    """What all ranks do.

    ``handles``, by rank: they reconfigure their groups with them. ``excluded``: they shrink their
    group by these of its ranks. ``over``: those who have a group of NCCL over this name space of
    the store reconfigure it, together with those that make one there. None of them: the group is
    made anew, for the reason ``why``, and so that it can be reconfigured or shrunk later if
    ``can_later``. ``objects_stay``: every rank has its objects of before the fault.
    """

    handles: tuple[str, ...] = ()
    excluded: tuple[int, ...] = ()
    can_later: bool = False
    why: str | None = None
    objects_stay: bool = False
    over: str | None = None

    def to_json(self) -> str:
        """As the store holds it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The inverse of ``to_json``."""
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("handles", "excluded")}
        return cls(**fields | lists)


def plan_for(offers: Sequence[Offer]) -> Plan:
    """What to do, from the offers of all ranks, in their order."""
    return dataclasses.replace(
        _plan_for_groups(offers), objects_stay=all(offer.goes_on for offer in offers)
    )


def _plan_for_groups(offers: Sequence[Offer]) -> Plan:
    for rank, offer in enumerate(offers):
        if offer.why_not is not None:
            return Plan(why=f"rank {rank}: {offer.why_not}")
        if offer.way != offers[0].way:
            return Plan(why=f"rank {rank} is asked for {offer.way}, rank 0 for {offers[0].way}")
    if over := {offer.over for offer in offers} - {None}:
        return _plan_to_join(offers, over)
    handles = tuple(offer.handle for offer in offers if offer.handle is not None)
    places = [offer.place for offer in offers if offer.place is not None]
    have = [offer.handle is not None or offer.place is not None for offer in offers]
    without = [rank for rank, has in enumerate(have) if not has]
    if without:
        first, lacks = without[0], offers[without[0]].lacks
        if len(without) == len(offers) and lacks == NO_GROUP:
            return Plan(can_later=True, why="no rank had a group")
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        return Plan(can_later=True, why=f"rank {first}{more} {lacks}")
    if handles and places:
        return Plan(can_later=True, why="ranks have groups of different kinds")
    if places:
        return _plan_to_shrink(places)
    if len(set(handles)) < len(handles):
        return Plan(can_later=True, why="two ranks have the same handle")
    return Plan(handles, can_later=True)


def _plan_to_join(offers: Sequence[Offer], over: Collection[str | None]) -> Plan:
    """torch takes any ranks in any order; what it makes the communicator of is its own affair."""
    if any(offer.handle is not None or offer.place is not None for offer in offers):
        return Plan(can_later=True, why="ranks have groups of different kinds")
    if len(over) > 1:
        return Plan(can_later=True, why="ranks have different groups")
    if len({offer.grows for offer in offers}) > 1:
        return Plan(can_later=True, why=f"{GROWS} is not the same on all ranks")
    return Plan(over=next(iter(over)), can_later=True)


def _plan_to_shrink(places: Sequence[tuple[int, int, int]]) -> Plan:
    """NCCL keeps the order of the ranks, and makes no communicator of all of them."""
    made_in, _, size = places[0]
    ranks = [rank for _, rank, _ in places]
    excluded = tuple(sorted(set(range(size)) - set(ranks)))
    if any((each, of) != (made_in, size) for each, _, of in places):
        return Plan(can_later=True, why="ranks have different groups")
    if ranks != sorted(set(ranks)):
        return Plan(can_later=True, why="ranks have changed their order")
    if not excluded:
        return Plan(can_later=True, why="no rank was lost")
    return Plan(excluded=excluded, can_later=True)


def failure_of(results: Sequence[str]) -> str:
    """Why all count as failed, from what each rank says of its own attempt. "": it is done.

    A rank whose time has run out may just have waited for one that failed, which tells more.
    """
    failed = [(said, rank) for rank, said in enumerate(results) if said]
    failed.sort(key=lambda each: each[0].startswith("TimeoutError"))
    reasons = [f"rank {rank}: {said}" for said, rank in failed]
    if not reasons:
        return ""
    return reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")


@dataclass(frozen=True)
class Had:
    """A group of before the fault, beside the default one, as one of its members has it.

    ``made`` names it: the iteration that it was made in, and its number there. ``rank`` is this
    member's in it, ``begun`` how many operations this one has begun. ``why_not`` it cannot be kept;
    ``None``: it can.
    """

    made: tuple[int, int]
    description: str
    rank: int
    size: int
    begun: int = 0
    why_not: str | None = None

    @staticmethod
    def to_json(had: Sequence[Had]) -> str:
        """As the store holds those of one rank."""
        return json.dumps([dataclasses.astuple(each) for each in had])

    @classmethod
    def from_json(cls, text: str | bytes) -> list[Had]:
        """The inverse of ``to_json``."""
        return [cls(tuple(made), *rest) for made, *rest in json.loads(text)]


def which_to_keep(
    description: str, ranks: Sequence[int], had: Sequence[Sequence[Had]]
) -> tuple[tuple[int, int] | None, str | None]:
    """Which group of before becomes that of ``ranks``, and why it cannot be kept.

    ``had`` is what each of the ranks has, in their order. Of several groups with these members it
    is the one that was made first: users ask for them in the same order each time. Where it cannot
    be kept no other one takes its place.
    """
    for first in sorted(had[0], key=lambda each: each.made):
        same = [each for of_rank in had for each in of_rank if each.made == first.made]
        places = [(each.rank, each.size, each.description) for each in same]
        if places == [(rank, len(ranks), description) for rank in range(len(ranks))]:
            return first.made, _why_not_kept(ranks, same)
    if any(had):
        return None, "no group of before has just these members, in this order"
    return None, "no rank had a group"


def _why_not_kept(ranks: Sequence[int], same: Sequence[Had]) -> str | None:
    reasons = [(rank, each.why_not) for rank, each in zip(ranks, same, strict=True) if each.why_not]
    # A rank that has ended the group for a reason of its own takes the others' connections.
    reasons.sort(key=lambda reason: reason[1] == LOST_CONNECTION)
    if reasons:
        return "rank {}: {}".format(*reasons[0])
    for rank, each in zip(ranks, same, strict=True):
        if each.begun != same[0].begun:
            return f"ranks {ranks[0]} and {rank} have begun different numbers of operations in it"
    return None


@dataclass(frozen=True)
class Regrouped:
    """How a group has come to its ``world_size`` members, in ``iteration``.

    The same on every rank, but for ``ms``, the milliseconds that it took on this one. ``why`` it
    was made ``ANEW``; ``None``: it was not, or the script made it, by torch's function, which has
    no other way. ``objects_stay``: no rank is new, so that what holds
    the default group can go on everywhere; where one is, it is made anew on all ranks, as what the
    new rank makes, such as DDP, talks to all others meanwhile. New is also a rank that a fault has
    found in ``on_membership`` before that had returned for the first time.
    """

    iteration: int
    rung: Rung
    world_size: int
    ms: float
    why: str | None = None
    objects_stay: bool = False
    group: str = "default"

    def renew(self, ddp: Any) -> None:
        """Have ``ddp``, a ``DistributedDataParallel`` over the default group, go on with that.

        On all ranks, if ``objects_stay``. Whatever the fault has interrupted its last backward pass
        in, the next forward pass begins anew. Raises ``TypeError`` for what has to be made anew,
        such as a module of FSDP2.
        """
        from torch import distributed

        if not hasattr(ddp, "_update_process_group"):
            kind = type(ddp).__name__
            raise TypeError(
                f"renew() takes a DistributedDataParallel: make the {kind} anew instead"
            )
        ddp._update_process_group(distributed.group.WORLD)

    def to_dict(self) -> dict[str, Any]:
        """As the incident has it."""
        return {
            "group": self.group,
            "rung": self.rung.value,
            "why": self.why,
            "ms": round(self.ms, 3),
        }

    def __str__(self) -> str:
        size = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        if self.rung is Rung.ANEW:
            return f"the {self.group} group of {size} is made anew, in {self.ms:.0f} ms: {self.why}"
        return f"the {self.group} group goes on with {size}, {self.rung.value} in {self.ms:.0f} ms"
