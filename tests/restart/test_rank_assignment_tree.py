"""Tree, by example: one small world per rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from ncclops.restart.rank_assignment import (
    Layer,
    LayerFlag,
    Tree,
    World,
    local_keys,
    plan,
)
from ncclops.restart.state import State

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL


def blocks_of(size: int) -> Callable[[State], object]:
    return lambda state: state.rank // size


def root(flag: LayerFlag | None = None, **limits: int) -> Layer:
    return Layer(key_or_fn="root", flag=flag, **limits)


def hosts(size: int, flag: LayerFlag | None = None, **limits: int) -> Layer:
    return Layer(key_or_fn=blocks_of(size), flag=flag, **limits)


def start(tree: Tree, size: int, dead: Iterable[int] = ()) -> World:
    """The first world of a job of ``size`` ranks, ``dead`` of which never showed up."""
    lost = set(dead)
    keys = {rank: local_keys(tree, State(rank, size)) for rank in range(size) if rank not in lost}
    return plan(tree, World(tuple(range(size))).with_keys(keys).losing(lost))


def active(world: World) -> tuple[int, ...]:
    return world.initial_ranks[: world.active]


def reserve(world: World) -> tuple[int, ...]:
    return world.initial_ranks[world.active :]


def after_losses(tree: Tree, size: int, deaths: Sequence[Iterable[int]]) -> World:
    world = start(tree, size)
    for lost in deaths:
        world = plan(tree, world.losing(lost))
    return world


def test_the_first_activation_goes_depth_first_up_to_every_limit() -> None:
    world = start(Tree([root(max_ranks=5), hosts(4, max_ranks=3)]), 12)
    assert active(world) == (0, 1, 2, 4, 5)
    assert reserve(world) == (3, 6, 7, 8, 9, 10, 11)


def test_the_references_two_level_example() -> None:
    """Hosts of 8, 256 active at most: a host with a loss is replaced by a spare host."""
    whole = {"min_ranks": 8, "max_ranks": 8}
    tree = Tree([root(RESERVE, min_ranks=128, max_ranks=256), hosts(8, RESERVE, **whole)])
    world = start(tree, 288)
    assert active(world) == tuple(range(256))
    world = plan(tree, world.losing([27]))
    assert active(world) == (*range(24), *range(256, 264), *range(32, 256))
    assert reserve(world) == tuple(range(264, 288))
    # The spares are used up after three more hosts; then the world shrinks by whole hosts.
    world = plan(tree, world.losing([40, 50, 60]))
    assert (world.active, reserve(world)) == (256, ())
    world = plan(tree, world.losing([0]))
    assert active(world)[:3] == (8, 9, 10)
    assert world.active == 248


def test_below_the_roots_minimum_no_rank_is_left() -> None:
    assert (
        len(after_losses(Tree([root(min_ranks=6), hosts(2, min_ranks=2)]), 8, [[0], [2, 4]])) == 0
    )


def test_a_branch_below_its_minimum_is_given_up_and_may_take_its_parent_along() -> None:
    """Racks of two hosts of two: with one host gone, the rack is below its minimum of three."""
    tree = Tree([root(), Layer(min_ranks=3, key_or_fn=blocks_of(4)), hosts(2, min_ranks=2)])
    assert after_losses(tree, 12, [[5]]).initial_ranks == (0, 1, 2, 3, 8, 9, 10, 11)


def test_ranks_that_never_showed_up_count_as_lost() -> None:
    assert start(Tree([root(), hosts(4, min_ranks=4)]), 8, dead=[2]).initial_ranks == (4, 5, 6, 7)


def test_a_lost_rank_is_replaced_in_place_by_the_reserve_of_its_host() -> None:
    world = after_losses(Tree([root(RESERVE), hosts(4, RESERVE, max_ranks=3)]), 8, [[5]])
    assert active(world) == (0, 1, 2, 4, 7, 6)
    assert reserve(world) == (3,)


def test_the_next_host_of_the_rack_is_nearer_than_another_rack() -> None:
    """Racks of two hosts of three, four active in each: 4, 5, 10 and 11 are reserves."""
    racks = Layer(max_ranks=4, key_or_fn=blocks_of(6), flag=RESERVE)
    world = after_losses(Tree([root(RESERVE), racks, hosts(3, RESERVE)]), 12, [[6]])
    assert active(world) == (0, 1, 2, 3, 10, 7, 8, 9)
    assert reserve(world) == (4, 5, 11)


def test_a_full_branch_lends_no_reserve_until_it_has_room() -> None:
    tree = Tree([root(RESERVE), hosts(3, RESERVE, max_ranks=2)])
    world = after_losses(tree, 6, [[0, 2]])
    assert active(world) == (1, 3, 4)
    assert reserve(world) == (5,)


def test_replacements_count_against_the_limits_themselves() -> None:
    """Two losses, two reserves in the other host, and room there for one of them."""
    world = after_losses(
        Tree([root(RESERVE, max_ranks=5), hosts(4, RESERVE, max_ranks=3)]), 8, [[0, 1, 3]]
    )
    assert active(world) == (6, 2, 4, 5)
    assert reserve(world) == (7,)


def test_all_losses_look_near_before_any_looks_far() -> None:
    """0 and 4 are lost. 0's host has no reserve: it must not take 5, which is nearest to 4."""
    tree = Tree([root(RESERVE, max_ranks=5), hosts(4, RESERVE)])
    world = start(tree, 12)
    assert active(world) == (0, 1, 2, 3, 4)
    assert active(plan(tree, world.losing([0, 4]))) == (6, 1, 2, 3, 5)


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (RESERVE, RESERVE, (3, 1, 2)),  # 3, through the root
        (None, RESERVE, (1, 2)),  # the search ends in the host
        (RESERVE, None, (1, 2)),  # the search cannot even leave the host
        (None, None, (1, 2)),
    ],
)
def test_a_search_ends_before_the_first_layer_without_the_flag(
    outer: LayerFlag | None, inner: LayerFlag | None, expected: tuple[int, ...]
) -> None:
    tree = Tree([root(outer, max_ranks=3), hosts(3, inner)])
    assert active(after_losses(tree, 6, [[0]])) == expected


def test_without_flags_the_ranks_shift_left() -> None:
    assert active(after_losses(Tree([root(), hosts(4)]), 8, [[1, 4]])) == (0, 2, 3, 5, 6, 7)


def test_backfill_moves_the_largest_ranks_into_the_gaps_of_their_domain() -> None:
    world = after_losses(Tree([root(BACKFILL)]), 8, [[1, 4, 5]])
    assert active(world) == (0, 7, 2, 3, 6)


def test_backfill_stays_inside_its_domain_and_the_rest_shifts() -> None:
    world = after_losses(Tree([root(), hosts(4, BACKFILL)]), 8, [[1]])
    assert active(world) == (0, 3, 2, 4, 5, 6, 7)


def test_backfill_goes_on_in_the_outer_domain() -> None:
    """Within the host 3 moves to 1; the gap it leaves is filled by 7, from the other host."""
    world = after_losses(Tree([root(BACKFILL), hosts(4, BACKFILL)]), 8, [[1]])
    assert active(world) == (0, 3, 2, 7, 4, 5, 6)


def test_reserves_come_before_backfill() -> None:
    """Of the two losses one finds a reserve (3); the other is backfilled, 7 having no room."""
    both = RESERVE | BACKFILL
    world = after_losses(Tree([root(both), hosts(4, both, max_ranks=3)]), 8, [[0, 1]])
    assert active(world) == (3, 2, 6, 4, 5)
    assert reserve(world) == (7,)


def test_the_filter_shrinks_and_the_surplus_is_the_first_reserve() -> None:
    tree = Tree([root(RESERVE, max_ranks=6)], world_size_filter=lambda size: size // 4 * 4)
    world = start(tree, 8)
    assert (active(world), reserve(world)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert world.surplus == 2
    assert active(plan(tree, world.losing([1]))) == (0, 4, 2, 3)


def test_the_filter_takes_its_surplus_back_without_a_reserve_domain() -> None:
    """Multiples of 4 of 7 are 4. With another loss 6 are healthy: 4 must go on, not 3 or none."""
    tree = Tree([root()], world_size_filter=lambda size: size // 4 * 4)
    assert active(after_losses(tree, 8, [[0]])) == (1, 2, 3, 4)
    assert active(after_losses(tree, 8, [[0], [2]])) == (1, 3, 4, 5)


@pytest.mark.parametrize("wrong", [9, -1])
def test_the_filter_may_only_shrink(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"world_size_filter\(8\) returned {wrong}"):
        start(Tree([root()], world_size_filter=lambda size: wrong), 8)


def test_there_is_one_root() -> None:
    with pytest.raises(RuntimeError, match=r"one key for all ranks, not 2.*key_or_fn='root'"):
        start(Tree([hosts(4)]), 8)


def test_neighbours_stay_together_where_the_launcher_interleaved_them() -> None:
    """Ranks 0, 2, 4 on one host and 1, 3, 5 on another: renumbered, with a warning."""
    tree = Tree([root(max_ranks=4), Layer(key_or_fn=lambda state: state.rank % 2)])
    with pytest.warns(UserWarning, match="depth-first order"):
        world = start(tree, 6)
    assert active(world) == (0, 2, 4, 1)
    assert reserve(world) == (3, 5)
