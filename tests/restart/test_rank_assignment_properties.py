"""What rank assignment promises for every world, topology and history of losses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.restart._assignment.tree import Census, Topology, replace_from_reserve
from ncclops.restart.compose import Compose
from ncclops.restart.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    MaxActiveWorldSize,
    RankAssignment,
    ShiftRanks,
    Tree,
    World,
    placements,
    plan,
)

# No deadline per example: the machines that run this are busy.
checked = settings(max_examples=150)

FLAGS = [None, LayerFlag.RESERVE, LayerFlag.BACKFILL, LayerFlag.RESERVE | LayerFlag.BACKFILL]
SIZES = st.integers(min_value=1, max_value=24)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A world with some ranks dead; ranks carry arbitrary initial numbers and one key."""
    size = draw(SIZES)
    return World(
        initial_ranks=tuple(draw(st.permutations(range(size)))),
        dead=frozenset(draw(st.sets(st.integers(0, size - 1)))),
        keys=tuple((draw(st.sampled_from("abc")),) for _ in range(size)),
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """A tree, its first world, and which initial ranks are lost after each iteration."""

    tree: Tree
    world: World
    losses: tuple[frozenset[int], ...]

    def history(self) -> Iterator[tuple[World, World]]:
        """The world before (with its losses) and after each assignment."""
        world = self.world
        for lost in self.losses:
            before = world.losing(lost)
            world = plan(self.tree, before)
            yield before, world


@st.composite
def jobs(draw: st.DrawFn, size_filter: bool = True) -> Job:
    size = draw(SIZES)
    # Contiguous blocks, as launchers number them, so that no depth-first warning arises.
    block_sizes = sorted(
        draw(st.lists(st.integers(1, size), min_size=0, max_size=2, unique=True)), reverse=True
    )
    layers = [draw(layer()) for _ in range(1 + len(block_sizes))]
    keys = tuple(("root", *(str(rank // block) for block in block_sizes)) for rank in range(size))
    filters: list[Callable[[int], int] | None] = [None]
    if size_filter:
        factor = draw(st.integers(1, 6))
        filters += [lambda n: n - n % factor, lambda n: min(n, factor), lambda n: n // 2]
    losses = draw(st.lists(st.frozensets(st.integers(0, size - 1), max_size=5), max_size=4))
    return Job(
        tree=Tree(layers, draw(st.sampled_from(filters))),
        world=World(tuple(range(size)), keys=keys),
        losses=(frozenset(), *losses),
    )


def layer() -> st.SearchStrategy[Layer]:
    return st.builds(
        Layer,
        min_ranks=st.integers(0, 4),
        max_ranks=st.none() | st.integers(1, 8),
        flag=st.sampled_from(FLAGS),
    )


def living(world: World) -> list[int]:
    return [world.initial_ranks[rank] for rank in world.alive]


def active(world: World) -> tuple[int, ...]:
    return world.initial_ranks[: world.active]


def branch_counts(world: World, depth: int, ranks: int) -> Counter[tuple[str, ...]]:
    return Counter(keys[: depth + 1] for keys in world.keys[:ranks])


ASSIGNMENTS: list[RankAssignment] = [
    ShiftRanks(),
    FillGaps(),
    Compose(ActivateAllRanks(), FillGaps()),
    Compose(ActiveWorldSizeDivisibleBy(3), MaxActiveWorldSize(7), ShiftRanks()),
    Compose(MaxActiveWorldSize(2), FillGaps(), FilterCountGroupedByKey("x", lambda n: n % 2 == 0)),
]


@checked
@given(worlds(), st.sampled_from(ASSIGNMENTS))
def test_ranks_are_a_gapless_bijection(world: World, assignment: RankAssignment) -> None:
    after = plan(assignment, world)
    assert len(set(after.initial_ranks)) == len(after)
    assert set(after.initial_ranks) <= set(living(world))
    placed = placements(after)
    assert sorted(placement.rank for placement in placed.values()) == list(range(len(after)))
    active_ranks = [p.active_rank for p in placed.values() if p.active_rank is not None]
    assert sorted(active_ranks) == list(range(after.active or 0))


@checked
@given(worlds())
def test_shift_keeps_the_order_and_everybody_alive(world: World) -> None:
    assert list(plan(ShiftRanks(), world).initial_ranks) == living(world)


@checked
@given(worlds())
def test_fill_gaps_keeps_the_first_ranks_and_the_order_of_those_that_move(world: World) -> None:
    after = plan(FillGaps(), world)
    size = len(world) - len(world.dead)
    assert sorted(after.initial_ranks) == sorted(living(world))
    movers = []
    for rank in range(size):
        if rank in world.dead:
            movers.append(world.initial_ranks.index(after.initial_ranks[rank]))
        else:
            assert after.initial_ranks[rank] == world.initial_ranks[rank]
    assert movers == sorted(movers)
    assert all(mover >= size for mover in movers)


@checked
@given(worlds(), st.integers(1, 5), st.integers(1, 12))
def test_filters_compose_from_the_last_to_the_first(world: World, divisor: int, top: int) -> None:
    alive = len(living(world))
    rounded_last = Compose(ActiveWorldSizeDivisibleBy(divisor), MaxActiveWorldSize(top), FillGaps())
    limited_last = Compose(MaxActiveWorldSize(top), ActiveWorldSizeDivisibleBy(divisor), FillGaps())
    assert plan(rounded_last, world).active == min(alive, top) // divisor * divisor
    assert plan(limited_last, world).active == min(alive // divisor * divisor, top)


@checked
@given(worlds(), st.sets(st.integers(1, 8)))
def test_groups_stay_whole_or_go_whole(world: World, wanted: set[int]) -> None:
    assignment = Compose(
        ShiftRanks(), FilterCountGroupedByKey(lambda state: "unused", lambda n: n in wanted)
    )
    after = plan(assignment, world)
    sizes = Counter(world.keys[rank] for rank in world.alive)
    expected = [
        world.initial_ranks[rank] for rank in world.alive if sizes[world.keys[rank]] in wanted
    ]
    assert list(after.initial_ranks) == expected


@checked
@given(jobs())
def test_tree_gives_gapless_ranks_to_survivors_only(job: Job) -> None:
    for before, after in job.history():
        assert len(set(after.initial_ranks)) == len(after)
        assert set(after.initial_ranks) <= set(living(before))
        assert 0 <= (after.active or 0) <= (after.active or 0) + after.surplus <= len(after)
        assert not after.dead


@checked
@given(jobs())
def test_tree_holds_every_minimum_and_maximum(job: Job) -> None:
    for _, after in job.history():
        for depth, of_layer in enumerate(job.tree.layers):
            healthy = branch_counts(after, depth, len(after))
            working = branch_counts(after, depth, after.active or 0)
            assert all(count >= of_layer.min_ranks for count in healthy.values())
            if of_layer.max_ranks is not None:
                assert all(count <= of_layer.max_ranks for count in working.values())


@checked
@given(jobs())
def test_tree_gives_up_no_branch_that_is_large_enough(job: Job) -> None:
    for before, after in job.history():
        given_up = set(living(before)) - set(after.initial_ranks)
        index = {initial: rank for rank, initial in enumerate(before.initial_ranks)}
        alive = [before.keys[rank] for rank in before.alive]
        kept = [before.keys[index[initial]] for initial in after.initial_ranks]
        for initial in given_up:
            keys = before.keys[index[initial]]
            # Bottom-up: what counts for a branch is who is left when its inner layers are done.
            assert any(
                sum(other[: depth + 1] == keys[: depth + 1] for other in kept) < of_layer.min_ranks
                for depth, of_layer in enumerate(job.tree.layers)
            )
        assert len(kept) + len(given_up) == len(alive)


@checked
@given(jobs())
def test_the_size_filter_only_shrinks(job: Job) -> None:
    """And what it leaves over are the next ranks, that is, the first reserves."""
    for _, after in job.history():
        offered = (after.active or 0) + after.surplus
        wanted = job.tree.world_size_filter(offered) if job.tree.world_size_filter else offered
        assert after.active == wanted <= offered


@checked
@given(jobs(size_filter=False))
def test_active_ranks_stay_active_and_in_order_unless_backfilled(job: Job) -> None:
    backfills = any(layer.allows(LayerFlag.BACKFILL) for layer in job.tree.layers)
    for before, after in job.history():
        if before.active is None:
            continue
        stayed = [rank for rank in active(before) if rank in after.initial_ranks]
        assert set(stayed) <= set(active(after))
        if not backfills:
            assert stayed == [rank for rank in active(after) if rank in stayed]


@checked
@given(jobs(size_filter=False))
def test_when_every_loss_is_replaced_no_other_rank_moves(job: Job) -> None:
    for before, after in job.history():
        if before.active is None or after.active != before.active:
            continue
        for old, new in zip(active(before), active(after), strict=True):
            assert old == new or old not in after.initial_ranks


@checked
@given(jobs())
def test_replacements_come_from_the_nearest_reserve_domain(job: Job) -> None:
    """No idle rank with room is nearer to a lost one than its replacement, in what is searched."""
    for before, _ in job.history():
        if before.active is None:
            continue
        topology = Topology.over(before, job.tree.layers)
        census = Census(topology)
        seats = [None if rank in before.dead else rank for rank in range(before.active)]
        lost = [seat for seat, rank in enumerate(seats) if rank is None]
        for rank in seats:
            if rank is not None:
                census.add(rank)
        taken = replace_from_reserve(census, before, seats)
        idle = set(range(before.active, len(before))) - before.dead - taken
        usable = [rank for rank in idle if census.has_room(rank)]
        searched = set(topology.outwards(LayerFlag.RESERVE))
        assert {seats[seat] for seat in lost} - {None} == taken
        for seat in lost:
            found = seats[seat]
            reach = -1 if found is None else shared_depth(topology, seat, found)
            assert found is None or reach >= min(searched)
            nearer = [rank for rank in usable if shared_depth(topology, seat, rank) > reach]
            assert not [rank for rank in nearer if shared_depth(topology, seat, rank) in searched]


@checked
@given(jobs(size_filter=False))
def test_the_first_activation_leaves_no_rank_idle_that_has_room(job: Job) -> None:
    after = plan(job.tree, job.world)
    census = Census(Topology.over(after, job.tree.layers))
    for rank in range(after.active or 0):
        assert census.has_room(rank)
        census.add(rank)
    assert not any(census.has_room(rank) for rank in range(after.active or 0, len(after)))


@checked
@given(jobs())
def test_any_rank_may_plan(job: Job) -> None:
    """The planner can change from one iteration to the next: all it needs is the world's text."""
    for before, after in job.history():
        assert plan(job.tree, World.from_json(before.to_json())) == after


def shared_depth(topology: Topology, one: int, other: int) -> int:
    """The depth of the innermost branch that two ranks have in common."""
    pairs = zip(topology.branches[one], topology.branches[other], strict=True)
    return max(depth for depth, (a, b) in enumerate(pairs) if a == b)
