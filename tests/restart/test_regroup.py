"""Which rung all ranks take with their default group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclops.restart.ledger import is_outdated
from ncclops.restart.regroup import (
    LOST_CONNECTION,
    Had,
    Offer,
    Plan,
    Regrouped,
    Rung,
    failure_of,
    plan_for,
    which_to_keep,
    why_nccl_not_in_place,
    why_never_kept,
    why_not_in_place,
    why_not_shrunk,
)

KEPT = [Offer(handle=f"handle {rank}", goes_on=True) for rank in range(3)]
NEW = Offer()
OVER = Offer(over="1/kept/0", goes_on=True)


def seats(size: int, *ranks: int, made_in: int = 0) -> list[Offer]:
    """Of the ranks of a group of NCCL that are left, in their new order."""
    return [Offer(place=(made_in, rank, size), goes_on=True) for rank in ranks]


def shrunk_by(*excluded: int) -> Plan:
    return Plan(excluded=excluded, can_later=True, objects_stay=True)


def anew(why: str) -> Plan:
    return Plan(can_later=True, why=why, objects_stay=True)


@pytest.mark.parametrize(
    ("backend", "has_reconfigure", "is_wrapped", "why"),
    [
        ("gloo", True, False, None),
        ("GLOO", True, False, None),
        ("gloo", False, False, "torch 2.13.0 cannot reconfigure groups, 2.14 and newer can"),
        ("nccl", True, False, "groups of nccl are reconfigured only with reconfigure=True"),
        ("cpu:gloo,cuda:nccl", True, False, "groups of cpu:gloo,cuda:nccl are not"),
        ("gloo", True, True, "TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around groups"),
    ],
)
def test_what_can_be_reconfigured(
    backend: str, has_reconfigure: bool, is_wrapped: bool, why: str | None
) -> None:
    said = why_not_in_place(
        backend, torch_version="2.13.0", has_reconfigure=has_reconfigure, is_wrapped=is_wrapped
    )
    assert (said or "").startswith(why or "") and (said is None) == (why is None)


@pytest.mark.parametrize(
    ("backend", "is_asked_for", "why"),
    [
        ("gloo", False, "reconfigure=False"),
        ("gloo", True, None),
        ("nccl", False, "reconfigure=False"),
        ("cpu:gloo,cuda:nccl", True, "groups of cpu:gloo,cuda:nccl are not reconfigured"),
    ],
)
def test_it_can_be_asked_for_and_ruled_out(
    backend: str, is_asked_for: bool, why: str | None
) -> None:
    said = why_not_in_place(
        backend,
        torch_version="2.15.0",
        has_reconfigure=True,
        is_wrapped=False,
        is_asked_for=is_asked_for,
    )
    assert (said or "").startswith(why or "") and (said is None) == (why is None)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({}, None),
        ({"has_second_engine": False}, "torch 2.15.0 cannot reconfigure groups of NCCL, 2.15 and"),
        ({"is_second_engine": False}, "groups are not of torch's second NCCL engine"),
        ({"nccl_version": (2, 28, 3)}, "NCCL 2.28.3 cannot revoke communicators, 2.28.7 and newer"),
        ({"has_device": False}, "without device_id"),
        ({"watchdog_ends_groups": True}, "torch's watchdog may abort communicators"),
        ({"is_wrapped": True}, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ],
)
def test_what_of_nccl_can_be_reconfigured(what: dict[str, Any], why: str | None) -> None:
    all_is_well: dict[str, Any] = {
        "torch_version": "2.15.0",
        "has_second_engine": True,
        "is_second_engine": True,
        "nccl_version": (2, 28, 7),
        "has_device": True,
        "is_wrapped": False,
        "watchdog_ends_groups": False,
    }
    said = why_nccl_not_in_place(**all_is_well | what)
    assert (said or "").startswith(why or "") and (said is None) == (why is None)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({}, None),
        ({"backend": "NCCL"}, None),
        ({"backend": "cpu:gloo,cuda:nccl"}, "groups of cpu:gloo,cuda:nccl are not shrunk"),
        ({"nccl_version": (2, 28, 3)}, "NCCL 2.28.3 cannot revoke communicators, 2.28.7 and newer"),
        ({"can_shrink": False}, "torch 2.13.0 cannot shrink groups of its NCCL"),
        ({"has_device": False}, "without device_id"),
        ({"watchdog_ends_groups": True}, "torch's watchdog may abort communicators"),
        ({"is_wrapped": True}, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ],
)
def test_what_can_be_shrunk(what: dict[str, Any], why: str | None) -> None:
    all_is_well: dict[str, Any] = {
        "backend": "nccl",
        "torch_version": "2.13.0",
        "can_shrink": True,
        "nccl_version": (2, 28, 7),
        "has_device": True,
        "is_wrapped": False,
        "watchdog_ends_groups": False,
    }
    said = why_not_shrunk(**all_is_well | what)
    assert (said or "").startswith(why or "") and (said is None) == (why is None)


@pytest.mark.parametrize(
    ("offers", "plan"),
    [
        (seats(4, 0, 2, 3), shrunk_by(1)),
        (seats(4, 1), shrunk_by(0, 2, 3)),
        ([Offer(place=(3, 1, 2))], Plan(excluded=(0,), can_later=True)),
        # NCCL makes none of all ranks, and keeps their order.
        (seats(3, 0, 1, 2), anew("no rank was lost")),
        (seats(4, 0, 3, 2), anew("ranks have changed their order")),
        ([*seats(4, 0, 1), *seats(4, 2, made_in=1)], anew("ranks have different groups")),
        ([*seats(4, 0, 1), *seats(3, 2)], anew("ranks have different groups")),
        ([*seats(4, 0), *KEPT[:1]], anew("ranks have groups of different kinds")),
        ([*seats(3, 0), NEW], Plan(can_later=True, why="rank 1 had no group of before")),
        ([*seats(3, 0), Offer(lacks="a"), NEW], Plan(can_later=True, why="rank 1 and 1 more a")),
        ([Offer(lacks="a"), NEW], Plan(can_later=True, why="rank 0 and 1 more a")),
        (
            KEPT,
            Plan(("handle 0", "handle 1", "handle 2"), can_later=True, objects_stay=True),
        ),
        ([NEW, NEW], Plan(can_later=True, why="no rank had a group")),
        # Of NCCL, who has none makes one that joins.
        ([OVER, OVER], Plan(over="1/kept/0", can_later=True, objects_stay=True)),
        ([OVER, NEW], Plan(over="1/kept/0", can_later=True)),
        (
            [Offer(lacks="a", goes_on=True), OVER],
            Plan(over="1/kept/0", can_later=True, objects_stay=True),
        ),
        ([OVER, replace(OVER, over="2/kept/0")], anew("ranks have different groups")),
        (
            [OVER, replace(OVER, grows=True)],
            anew("TORCH_NCCL2_RECONFIGURE_SHRINK_GROW is not the same on all ranks"),
        ),
        ([OVER, *KEPT[:1]], anew("ranks have groups of different kinds")),
        ([OVER, Offer("torch is old")], Plan(why="rank 1: torch is old")),
        ([*KEPT, NEW], Plan(can_later=True, why="rank 3 had no group of before")),
        ([NEW, *KEPT, NEW], Plan(can_later=True, why="rank 0 and 1 more had no group of before")),
        (
            [*KEPT, KEPT[0]],
            Plan(can_later=True, why="two ranks have the same handle", objects_stay=True),
        ),
        # Their groups are gone, their objects are not.
        (
            [*KEPT, Offer(goes_on=True)],
            Plan(can_later=True, why="rank 3 had no group of before", objects_stay=True),
        ),
        ([Offer("a", goes_on=True)], Plan(why="rank 0: a", objects_stay=True)),
        ([*KEPT, Offer("torch is old")], Plan(why="rank 3: torch is old")),
        ([Offer("a"), Offer("b")], Plan(why="rank 0: a")),
        ([NEW, Offer("a")], Plan(why="rank 1: a")),
        # Where not all call for the same, what comes of it is the same on all.
        (
            [Offer(way="shrinking"), Offer(way="the reconfiguration")],
            Plan(why="rank 1 is asked for the reconfiguration, rank 0 for shrinking"),
        ),
    ],
)
def test_all_take_the_rung_that_each_can_take(offers: list[Offer], plan: Plan) -> None:
    assert plan_for(offers) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert [Offer.from_json(offer.to_json().encode()) for offer in offers] == offers


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        (["", "", ""], ""),
        (["", "timed out", ""], "rank 1: timed out"),
        (["", "timed out", "broken pipe"], "rank 1: timed out (and 1 more)"),
        (["TimeoutError: 2 s", "broken pipe"], "rank 1: broken pipe (and 1 more)"),
        (["TimeoutError: 2 s", "TimeoutError: 3 s"], "rank 0: TimeoutError: 2 s (and 1 more)"),
    ],
)
def test_one_failure_is_one_of_all(results: list[str], reason: str) -> None:
    assert failure_of(results) == reason


def test_what_it_says() -> None:
    went_on = Regrouped(3, Rung.RECONFIGURED, 2, 4.4)
    assert str(went_on) == "the default group goes on with 2 ranks, reconfigured in 4 ms"
    shrunk = Regrouped(3, Rung.SHRUNK, 2, 4.4)
    assert str(shrunk) == "the default group goes on with 2 ranks, shrunk in 4 ms"
    made = Regrouped(3, Rung.ANEW, 1, 30.1234, "rank 0: a")
    assert str(made) == "the default group of 1 rank is made anew, in 30 ms: rank 0: a"
    assert made.to_dict() == {
        "group": "default",
        "rung": "anew",
        "why": "rank 0: a",
        "ms": 30.123,
    }


@pytest.mark.parametrize(
    ("key", "outdated"),
    [
        ("3/groups/0/0//cpu//0", True),
        ("4/groups/0/0//cpu//0", False),
        ("3/call0/1/done", True),
        ("3/outcome", False),
        ("3/snapshots/default/plan/0/1", True),
        ("4/snapshots/default/plan/0/1", False),
        ("gone", False),
        # Of a group that was made in iteration 1: what iteration 3 has used, and 4 uses.
        ("1/kept/0/later/0//cpu//reconfigure/3000/0/1", True),
        ("1/kept/0/later/0//cpu//reconfigure/4000/0/1", False),
        ("1/kept/0/later/0//cpu//reconfigure/4001/claimed", False),
        ("1/kept/0/later/0//cuda//nccl2_reconfigure/3000/claimed", True),
        ("1/kept/0/later/0//cuda//nccl2_reconfigure/4000/claimed", False),
        ("1/kept/0/later/ncclops/meeting/0/2/next", True),
        ("4/kept/0/later/0//cpu//reconfigure/4000/0/1", False),
    ],
)
def test_which_keys_no_rank_reads_any_more(key: str, outdated: bool) -> None:
    assert is_outdated(key, iteration=4) == outdated


@pytest.mark.parametrize(
    ("kept_since", "outdated"),
    [(None, [1, 2, 3]), (1, []), (2, [1]), (4, [1, 2, 3])],
)
def test_a_group_that_has_come_from_another_one_uses_the_keys_of_that(
    kept_since: int | None, outdated: list[int]
) -> None:
    made_in = range(1, 6)
    found = [
        number
        for number in made_in
        if is_outdated(f"{number}/shrinkable/0/once/0//cuda//0:1", 4, kept_since)
    ]
    assert found == outdated


@pytest.mark.parametrize(
    ("number", "outdated"),
    [(1, True), (2, False), (4, False)],
)
def test_a_group_beside_it_uses_its_keys_while_it_is_kept(number: int, outdated: bool) -> None:
    key = f"{number}/beside/2000000/0//cuda//0:1"
    assert is_outdated(key, 4, beside_since=2) == outdated
    assert not is_outdated(key, 4), "another rank knows what is in use"


def test_which_groups_are_kept_at_all() -> None:
    assert why_never_kept("gloo", is_wrapped=False, all_meet=False) is None
    assert why_never_kept("NCCL", is_wrapped=False, all_meet=False) is None
    assert why_never_kept("cpu:gloo,cuda:nccl", is_wrapped=False, all_meet=False) is not None
    assert why_never_kept("gloo", is_wrapped=True, all_meet=False) is not None
    assert why_never_kept("gloo", is_wrapped=False, all_meet=True) is not None


def pair(number: int, rank: int, size: int = 2, **fields: Any) -> Had:
    """What a member has of a group that was made in iteration 3."""
    return Had((3, number), "gloo tp", rank, size, **fields)


@pytest.mark.parametrize(
    ("had", "kept", "why"),
    [
        ([[pair(0, 0)], [pair(0, 1)]], (3, 0), None),
        ([[], []], None, "no rank had a group"),
        # A rank was lost, is new, or has changed its place.
        ([[pair(0, 0, 3)], [pair(0, 1, 3)]], None, "no group of before has just these members"),
        ([[pair(0, 0)], []], None, "no group of before has just these members"),
        ([[pair(0, 1)], [pair(0, 0)]], None, "no group of before has just these members"),
        # Of several the first that was made, also where that is of no use.
        ([[pair(1, 0), pair(0, 0)], [pair(0, 1), pair(1, 1)]], (3, 0), None),
        ([[pair(0, 0), pair(1, 0)], [pair(1, 1)]], (3, 1), None),
        (
            [[pair(0, 0), pair(1, 0)], [pair(0, 1, why_not="busy"), pair(1, 1)]],
            (3, 0),
            "rank 7: busy",
        ),
        # What one has ended is no surprise to the other.
        (
            [[pair(0, 0, why_not=LOST_CONNECTION)], [pair(0, 1, why_not="busy")]],
            (3, 0),
            "rank 7: busy",
        ),
        (
            [[pair(0, 0, begun=4)], [pair(0, 1, begun=5)]],
            (3, 0),
            "ranks 4 and 7 have begun different numbers of operations in it",
        ),
    ],
)
def test_which_group_of_before_two_ranks_keep(
    had: list[list[Had]], kept: tuple[int, int] | None, why: str | None
) -> None:
    said = [Had.from_json(Had.to_json(of_rank)) for of_rank in had]
    found, reason = which_to_keep("gloo tp", [4, 7], said)
    assert found == kept
    assert (reason or "").startswith(why or "") and (reason is None) == (why is None)
    assert which_to_keep("gloo dp", [4, 7], said)[0] is None


def test_what_has_to_be_made_anew_is_not_renewed() -> None:
    group = Regrouped(3, Rung.ANEW, 2, 4.4, "rank 0: a", objects_stay=True)
    with pytest.raises(TypeError, match="make the object anew instead"):
        group.renew(object())
