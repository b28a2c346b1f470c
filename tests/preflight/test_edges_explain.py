"""The smallest cause: what is planted is found and nothing beside it; nothing planted, nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.preflight.edges.explain import Claim, Edge, explain
from ncclops.preflight.edges.schedule import edges_between

Planted = tuple[str, set[Edge]]


def never(edge: Edge) -> bool:
    return False


def subnets(n: int, cut: int) -> dict[str, dict[str, list[int]]]:
    return {"subnet": {"10.0.1.0/24": list(range(cut)), "10.0.2.0/24": list(range(cut, n))}}


def plant(rng: random.Random, n: int, cut: int) -> Planted:
    """One cause in a cluster of ``n`` hosts, the first ``cut`` of them in a subnet of their own."""
    everyone = list(range(n))
    a, b = rng.sample(everyone, 2)
    first, second = everyone[:cut], everyone[cut:]
    into, out = edges_between(everyone, (a,)), edges_between((a,), everyone)
    there, back = edges_between(first, second), edges_between(second, first)
    return rng.choice(
        [
            ("host-in", into),
            ("host-out", out),
            ("host", into | out),
            ("edge", {(a, b)}),
            ("pair", {(a, b), (b, a)}),
            ("group", there),
            ("group", there | back),
        ]
    )


def claimed(claims: list[Claim]) -> set[Edge]:
    return {edge for claim in claims for edge in claim.explained}


@pytest.mark.parametrize("start", range(0, 500, 50))
def test_a_planted_cause_is_found_alone(start: int) -> None:
    for seed in range(start, start + 50):
        rng = random.Random(seed)
        n = rng.randint(5, 16)
        cut = rng.randint(2, n - 2)
        shape, failed = plant(rng, n, cut)
        claims = explain(range(n), failed, never, subnets(n, cut))
        assert [claim.shape for claim in claims] == [shape], seed
        assert claimed(claims) == failed, seed


@pytest.mark.parametrize("start", range(0, 500, 50))
def test_two_planted_causes_are_two(start: int) -> None:
    """Or fewer, where one claim says it all; and no working edge is claimed."""
    for seed in range(start, start + 50):
        rng = random.Random(1000 + seed)
        n = rng.randint(6, 16)
        cut = rng.randint(2, n - 2)
        failed = plant(rng, n, cut)[1] | plant(rng, n, cut)[1]
        claims = explain(range(n), failed, never, subnets(n, cut))
        assert len(claims) <= 2, seed
        assert claimed(claims) == failed, seed


@given(st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.sets(edges(n)))))
@settings(max_examples=300, deadline=None)
def test_any_failures_are_explained_by_no_more_than_they_are(case: tuple[int, set[Edge]]) -> None:
    """No claim has an edge that works, each explains something, and together they explain all."""
    n, failed = case
    claims = explain(range(n), failed, never)
    assert claimed(claims) == failed
    assert all(claim.explained for claim in claims)
    for claim in claims:
        if claim.shape in ("host-in", "host"):
            assert edges_between(range(n), claim.a) <= failed
        if claim.shape in ("host-out", "host"):
            assert edges_between(claim.a, range(n)) <= failed


def edges(n: int) -> st.SearchStrategy[Edge]:
    numbers = st.integers(0, n - 1)
    return st.tuples(numbers, numbers).filter(lambda edge: edge[0] != edge[1])


def test_nothing_failed_nothing_is_claimed() -> None:
    assert explain(range(8), set(), never, subnets(8, 4)) == []


def test_of_two_hosts_neither_is_convicted() -> None:
    """One host's word on the other: it may be either."""
    assert [each.shape for each in explain((0, 1), {(0, 1), (1, 0)}, never)] == ["pair"]


def test_one_host_that_works_with_another_is_not_convicted() -> None:
    failed = edges_between((0,), (1, 2)) | edges_between((1, 2), (0,))
    claims = explain(range(4), failed, never)
    assert {claim.shape for claim in claims} == {"pair"}
    assert claimed(claims) == failed


def test_edges_that_were_not_tried_convict_nobody() -> None:
    """Two hosts say that they do not reach host 0; of the others nothing is known."""

    def unknown(edge: Edge) -> bool:
        return edge not in {(1, 0), (2, 0), (1, 2), (2, 1)}

    claims = explain(range(6), {(1, 0), (2, 0)}, unknown)
    assert [(claim.shape, claim.a) for claim in claims] == [("host-in", (0,))]
    assert explain(range(6), {(1, 0)}, unknown)[0].shape == "edge"


def test_hosts_of_one_switch_that_nothing_names() -> None:
    """Hosts 1, 4, 5 do not reach 2, 3, 6 and the other way round."""
    a, b = (1, 4, 5), (2, 3, 6)
    failed = edges_between(a, b) | edges_between(b, a)
    (claim,) = explain(range(8), failed, never)
    assert claim.shape == "group"
    assert claim.both_ways
    assert {frozenset(claim.a), frozenset(claim.b)} == {frozenset(a), frozenset(b)}


def test_nobody_reaches_anybody() -> None:
    everyone = range(5)
    (claim,) = explain(everyone, edges_between(everyone, everyone), never)
    assert claim.shape == "everything"


def test_many_single_edges_are_one_finding() -> None:
    """A list of forty edges helps nobody."""
    rng = random.Random(3)
    everyone = list(range(24))
    failed = {(a, b) for a, b in (rng.sample(everyone, 2) for _ in range(40))}
    claims = explain(everyone, failed, never)
    assert sum(claim.shape == "several" for claim in claims) == 1
    assert claimed(claims) == failed


def test_hosts_that_make_a_subnet_are_told_as_that() -> None:
    """Of one of the two it is not known whether it reaches the other."""
    there = edges_between((6, 7), range(6))
    claims = explain(
        range(8), there - {(7, 2)}, lambda edge: edge in {(6, 7), (7, 2)}, subnets(8, 6)
    )
    assert [(each.shape, each.a, each.b) for each in claims] == [("group", (6, 7), tuple(range(6)))]
