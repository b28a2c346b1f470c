"""Who takes what from where, over all shapes of jobs: pure, and checked against brute force."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.restart.snapshot._agreement import Told, orders
from ncclops.restart.snapshot._planning import (
    OWN,
    SHARED,
    Fetch,
    Holding,
    Label,
    Moment,
    Plan,
    Seat,
    Source,
    needs_partner,
    partners,
    plan,
)
from ncclops.restart.snapshot._wire import Address

DOMAINS = ("a", "b", "c")


def label(
    unit: str, step: int, rank: int, *, epoch: int = 1, world: int = 4, shard: str = ""
) -> Label:
    return Label(unit, epoch, step, rank, world, rank, shard, "layout", 8, f"{unit}{step}{rank}")


def seat(role: int, *holdings: Holding, needs: tuple[str, ...] = (OWN,), **changes: str) -> Seat:
    return Seat(
        role=role,
        seat=role,
        domain=changes.get("domain", f"host{role}"),
        shard=changes.get("shard", ""),
        needs=dict.fromkeys(needs, "layout"),
        holdings=holdings,
    )


def own(step: int, rank: int, *, epoch: int = 1, world: int = 4) -> Holding:
    return Holding(label(OWN, step, rank, epoch=epoch, world=world))


def copy(step: int, rank: int, *, world: int = 4) -> Holding:
    return Holding(label(OWN, step, rank, world=world), is_copy=True)


def sources(made: Plan) -> list[str]:
    return [each.source.value for fetches in made.fetches.values() for each in fetches.values()]


def test_where_nothing_is_kept_there_is_nothing_to_restore() -> None:
    made = plan([seat(0), seat(1)])
    assert (made.moment, made.fetches, made.missing) == (None, {}, "")


def test_the_newest_step_that_all_have_is_taken_though_some_have_a_newer_one() -> None:
    ahead = seat(0, own(5, 0, world=2), own(6, 0, world=2))
    made = plan([ahead, seat(1, own(5, 1, world=2))])
    assert made.moment == Moment(1, 5)
    assert sources(made) == ["memory", "memory"]
    assert made.missing == "step 6: nobody has the own state of rank 1"


def test_a_rank_with_nothing_takes_the_copy_of_its_predecessor_from_the_partner() -> None:
    made = plan([seat(0, own(5, 0, world=2), copy(5, 1, world=2)), seat(1)])
    assert made.fetches[1][OWN] == Fetch(label(OWN, 5, 1, world=2), 0, Source.PARTNER)


def test_the_loss_of_both_of_a_pair_leaves_nothing_of_that_step() -> None:
    made = plan([seat(0, own(5, 0, world=2)), seat(1)])
    assert made.moment is None
    assert "rank 1" in made.missing


def test_a_moment_of_a_later_epoch_is_newer_though_its_step_is_lower() -> None:
    stale = own(9, 0, world=1, epoch=1)
    assert plan([seat(0, stale, own(7, 0, world=1, epoch=2))]).moment == Moment(2, 7)


def test_in_a_smaller_world_a_process_goes_on_with_what_it_had() -> None:
    shifted = dataclasses.replace(seat(1, own(5, 2, world=3)), seat=2)
    made = plan([seat(0, own(5, 0, world=3)), shifted])
    assert made.moment == Moment(1, 5)
    assert made.fetches[1][OWN].label.seat == 2


def test_in_a_world_of_the_same_size_the_number_decides_whoever_sits_there() -> None:
    """A reserve has joined, and the numbers have moved up by one."""
    moved = [
        seat(0, own(5, 0, world=3), copy(5, 1, world=3)),
        dataclasses.replace(seat(1, own(5, 2, world=3)), seat=2),
        dataclasses.replace(seat(2), seat=3),
    ]
    made = plan(moved)
    assert {role: each[OWN].label.role for role, each in made.fetches.items()} == {0: 0, 1: 1, 2: 2}
    assert sources(made) == ["memory", "partner", "replica"]


def test_another_layout_is_not_taken() -> None:
    other = dataclasses.replace(seat(0, own(5, 0, world=1)), needs={OWN: "another"})
    assert plan([other]).moment is None


def test_a_replica_is_asked_before_a_partner_and_the_nearest_first() -> None:
    held = [Holding(label(SHARED, 5, rank)) for rank in range(3)]
    seats = [
        seat(0, needs=(SHARED,), domain="a"),
        seat(1, held[1], needs=(SHARED,), domain="b"),
        seat(2, held[2], needs=(SHARED,), domain="a"),
    ]
    fetch = plan(seats).fetches[0][SHARED]
    assert (fetch.holder, fetch.source) == (2, Source.REPLICA)


def test_what_has_turned_out_not_to_be_there_is_left_out() -> None:
    seats = [seat(0, copy(5, 1, world=2), own(5, 0, world=2)), seat(1, own(5, 1, world=2))]
    first = plan(seats).fetches[1][OWN]
    assert first.holder == 1
    second = plan(seats, {(1, first.label)}).fetches[1][OWN]
    assert (second.holder, second.source) == (0, Source.PARTNER)
    assert plan(seats, {(1, first.label), (0, first.label)}).moment is None


def test_requests_are_spread_over_replicas() -> None:
    holders = [
        seat(rank, Holding(label(SHARED, 5, rank)), needs=(SHARED,), domain="a") for rank in (0, 1)
    ]
    empty = [seat(rank, needs=(SHARED,), domain="b") for rank in range(2, 8)]
    made = plan([*holders, *empty])
    asked = [made.fetches[rank][SHARED].holder for rank in range(2, 8)]
    assert sorted(asked) == [0, 0, 0, 1, 1, 1]


@st.composite
def jobs(draw: st.DrawFn) -> list[Seat]:
    """A job after faults: whoever has lost what, with copies anywhere."""
    world = draw(st.integers(1, 5))
    shards = draw(st.sampled_from([("",), ("x", "y")]))
    seats = []
    for role in range(world):
        holdings = []
        for step in (1, 2):
            for unit in (OWN, SHARED):
                for rank in range(world):
                    kept = draw(st.sampled_from(["no", "no", "own", "copy"]))
                    if kept == "no" or (kept == "own" and rank != role):
                        continue
                    shard = shards[rank % len(shards)] if unit == SHARED else ""
                    name = label(unit, step, rank, world=world, shard=shard)
                    holdings.append(Holding(name, kept == "copy"))
        shard, domain = shards[role % len(shards)], draw(st.sampled_from(DOMAINS))
        needs = dict.fromkeys((OWN, SHARED), "layout")
        seats.append(Seat(role, role, domain, shard, needs, holdings))
    return seats


def is_complete(seats: list[Seat], moment: Moment) -> bool:
    """Brute force."""
    at = [h.label for each in seats for h in each.holdings if h.label.moment == moment]
    return all(
        any(each.unit == OWN and each.role == seat.role for each in at)
        and any(each.unit == SHARED and each.shard == seat.shard for each in at)
        for seat in seats
    )


@given(jobs())
def test_the_newest_complete_moment_is_taken_and_all_needs_are_met(seats: list[Seat]) -> None:
    made = plan(seats)
    moments = {h.label.moment for each in seats for h in each.holdings}
    complete = [each for each in moments if is_complete(seats, each)]
    assert made.moment == max(complete, default=None)
    by_role = {each.role: each for each in seats}
    for role, fetches in made.fetches.items():
        assert set(fetches) == set(by_role[role].needs)
        for unit, fetch in fetches.items():
            assert fetch.label.moment == made.moment
            holdings = by_role[fetch.holder].holdings
            is_copy = fetch.source is Source.PARTNER
            assert Holding(fetch.label, is_copy) in holdings, "its holder has it"
            own_label = [
                h for h in by_role[role].holdings if not h.is_copy and h.label.moment == made.moment
            ]
            fitting = [h for h in own_label if h.label.unit == unit]
            if fitting and unit == OWN:
                assert fetch.source is Source.MEMORY


@given(jobs(), st.randoms())
def test_the_order_in_which_ranks_are_told_of_changes_nothing(seats: list[Seat], chance) -> None:  # type: ignore[no-untyped-def]
    shuffled = [
        dataclasses.replace(each, holdings=chance.sample(each.holdings, len(each.holdings)))
        for each in chance.sample(seats, len(seats))
    ]
    before, after = plan(seats), plan(shuffled)
    assert (before.moment, before.epoch) == (after.moment, after.epoch)
    for role, fetches in before.fetches.items():
        for unit, fetch in fetches.items():
            assert after.fetches[role][unit].source is fetch.source


@given(st.lists(st.sampled_from(DOMAINS), min_size=1, max_size=24))
def test_each_rank_keeps_one_copy_in_another_domain_where_that_is_possible(
    domains: list[str],
) -> None:
    found = partners(domains)
    if len(domains) == 1:
        assert found == [None]
        return
    kept = [each for each in found if each is not None]
    assert sorted(kept) == list(range(len(domains))), "each keeps exactly one"
    assert all(partner != rank for rank, partner in enumerate(found))
    if 2 * max(map(domains.count, domains)) <= len(domains):
        assert all(domains[rank] != domains[each] for rank, each in enumerate(kept))


@given(jobs())
def test_labels_survive_the_way_over_the_wire(seats: list[Seat]) -> None:
    for each in seats:
        for holding in each.holdings:
            assert Label.from_json(holding.label.as_json()) == holding.label


def test_replicas_in_two_domains_need_no_copy_and_own_state_does() -> None:
    both = (OWN, SHARED)
    apart = [seat(0, needs=both, domain="a"), seat(1, needs=both, domain="b")]
    assert needs_partner(apart) == {OWN: True, SHARED: False}
    one_has_a_shard_alone = [*apart, seat(2, needs=both, domain="a", shard="x")]
    assert needs_partner(one_has_a_shard_alone) == {OWN: True, SHARED: True}
    one_host = [seat(0, needs=both, domain="a"), seat(1, needs=both, domain="a")]
    assert needs_partner(one_host) == {OWN: True, SHARED: False}


@pytest.mark.parametrize(("asked", "agreed"), [((1, 5), 5), ((None, 5), 5), ((None, None), None)])
def test_all_ranks_take_snapshots_at_the_same_steps(
    asked: tuple[int | None, ...], agreed: int | None
) -> None:
    told = [
        Told(seat(role), Address("h", 1, "token"), 1, every, 8, wants_partner=True, goes_on=False)
        for role, every in enumerate(asked)
    ]
    found = orders(plan([each.seat for each in told], set()), told)
    assert [order.every for order in found] == [agreed] * len(told)
