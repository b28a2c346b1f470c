"""Rank by rank: every rank runs the assignment itself, over a real store, as in the public API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.restart.compose import Compose
from ncclops.restart.exception import TimeoutError as RestartTimeoutError
from ncclops.restart.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
    Tree,
    World,
    assign,
    local_keys,
    placements,
    plan,
)
from ncclops.restart.state import Mode, State

SIZE = 6
PATIENCE = timedelta(seconds=30)


class Ranks:
    """Ranks as threads, each with its own state, assignment object and connection."""

    def __init__(
        self, make: Callable[[], RankAssignment], stores: list[dist.Store], prefix: str = ""
    ) -> None:
        self.prefix = prefix
        self.stores = dict(enumerate(stores))
        self.states = {rank: State(rank=rank, world_size=SIZE) for rank in range(SIZE)}
        self.assignments = {rank: make() for rank in range(SIZE)}

    def assign(self, lost: Iterable[int] = ()) -> dict[int, State]:
        """One assignment after losing initial ranks; returns the states of those who stay."""
        terminated = {self.states[initial].rank for initial in lost if initial in self.states}
        for initial in lost:
            self.states.pop(initial, None)
        with ThreadPoolExecutor(SIZE) as pool:
            stayed = dict(pool.map(lambda i: (i, self._one(i, set(terminated))), self.states))
        self.states = {initial: state for initial, state in stayed.items() if state is not None}
        for state in self.states.values():
            state.advance()
        return self.states

    def _one(self, initial: int, terminated: set[int]) -> State | None:
        state = self.states[initial]
        store = dist.PrefixStore(f"{self.prefix}{state.iteration}", self.stores[initial])
        try:
            return assign(
                self.assignments[initial], RankAssignmentCtx(state, store, terminated)
            ).state
        except RankDiscarded:
            return None


def seen(states: dict[int, State]) -> dict[int, tuple[int, int, int | None, int | None, Mode]]:
    return {
        initial: (s.rank, s.world_size, s.active_rank, s.active_world_size, s.mode)
        for initial, s in states.items()
    }


def planned(world: World) -> dict[int, tuple[int, int, int | None, int | None, Mode]]:
    return {
        initial: (p.rank, p.world_size, p.active_rank, p.active_world_size, p.mode)
        for initial, p in placements(world).items()
    }


@pytest.fixture(scope="module")
def tcp_stores() -> Iterator[list[dist.Store]]:
    """A server and a client per rank."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connect = {"host_name": "127.0.0.1", "port": server.port, "timeout": PATIENCE}
    yield [dist.TCPStore(is_master=False, wait_for_workers=False, **connect) for _ in range(SIZE)]
    del server


def node_filter() -> RankAssignment:
    return Compose(
        ActivateAllRanks(),
        ShiftRanks(),
        FilterCountGroupedByKey(lambda s: s.rank // 2, lambda n: n == 2, PATIENCE),
    )


def two_filters() -> RankAssignment:
    return Compose(
        FillGaps(),
        FilterCountGroupedByKey(lambda s: s.rank % 2, lambda n: n != 1, PATIENCE),
        FilterCountGroupedByKey(lambda s: s.initial_rank // 3, lambda n: n > 1, PATIENCE),
    )


def filters() -> RankAssignment:
    return Compose(ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(5), ShiftRanks())


def tree() -> RankAssignment:
    flags = LayerFlag.RESERVE
    return Tree(
        [Layer(key_or_fn="root", flag=flags), Layer(2, 2, lambda s: s.rank // 3, flags)],
        world_size_filter=lambda n: n - n % 2,
    )


ALL = [node_filter, two_filters, filters, tree, ShiftRanks, FillGaps]


@settings(max_examples=40)
@given(
    make=st.sampled_from(ALL),
    losses=st.lists(st.frozensets(st.integers(0, SIZE - 1), max_size=2), max_size=3),
)
def test_rank_by_rank_agrees_with_the_global_plan(
    make: Callable[[], RankAssignment], losses: list[frozenset[int]]
) -> None:
    store = dist.HashStore()
    ranks = Ranks(make, [store] * SIZE)
    world = World(tuple(range(SIZE)))
    for lost in (frozenset[int](), *losses):
        remaining = [initial for initial in ranks.states if initial not in lost]
        keys = {i: local_keys(make(), ranks.states[i]) for i in remaining}
        before = world.losing(lost)
        world = plan(make(), before.with_keys(keys) if remaining else before)
        assert seen(ranks.assign(lost)) == planned(world)


@pytest.mark.parametrize("make", [node_filter, two_filters, tree])
def test_over_tcp(make: Callable[[], RankAssignment], tcp_stores: list[dist.Store]) -> None:
    ranks = Ranks(make, tcp_stores, prefix=make.__name__)
    first = dict(ranks.assign())
    assert sorted(state.rank for state in first.values()) == list(range(len(first)))
    second = ranks.assign([1])
    assert 0 < len(second) < len(first)
    assert sorted(state.rank for state in second.values()) == list(range(len(second)))


def test_a_rank_that_does_not_take_part_is_named(tcp_stores: list[dist.Store]) -> None:
    """Nobody waits without a deadline: all ranks learn who is missing."""
    impatient = timedelta(milliseconds=200)

    def run(rank: int) -> str:
        assignment = FilterCountGroupedByKey("all", bool, impatient)
        store = dist.PrefixStore("missing", tcp_stores[rank])
        with pytest.raises(RestartTimeoutError) as caught:
            assignment(RankAssignmentCtx(State(rank=rank, world_size=3), store, set()))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        collecting, waiting = pool.map(run, [0, 1])
    assert "ranks [2]" in collecting
    assert "ranks [0]" in waiting


def test_terminated_ranks_are_marked_by_the_filter_and_emptied_by_the_shift() -> None:
    """Called one after the other, as a user's own assignment may do."""
    store = dist.HashStore()
    ctx = RankAssignmentCtx(State(rank=2, world_size=3), store, {0})
    marked = FilterCountGroupedByKey("alone", lambda n: n > 5, PATIENCE)

    def run(rank: int) -> RankAssignmentCtx:
        mine = ctx if rank == 2 else RankAssignmentCtx(State(rank, 3), store, {0})
        return marked(mine)

    with ThreadPoolExecutor(2) as pool:
        assert all(result.terminated_ranks == {0, 1, 2} for result in pool.map(run, [1, 2]))
    assert ctx.state.rank == 2
    with pytest.raises(RankDiscarded, match="rank 2"):
        ShiftRanks()(ctx)
    alone = ShiftRanks()(RankAssignmentCtx(State(rank=2, world_size=3), store, {0}))
    assert (alone.state.rank, alone.state.world_size, alone.terminated_ranks) == (1, 2, set())


@pytest.mark.parametrize("make", [ShiftRanks, FillGaps])
def test_the_callers_set_of_terminated_ranks_is_left_alone(
    make: Callable[[], RankAssignment],
) -> None:
    given = {0}
    result = make()(RankAssignmentCtx(State(rank=1, world_size=2), dist.HashStore(), given))
    assert result.terminated_ranks == set()
    assert given == {0}


def test_a_tree_starts_anew_for_the_next_job_of_the_process() -> None:
    """Wrapped functions can be called again; the second call is independent of the first."""
    shared = Tree([Layer(key_or_fn="root", max_ranks=1)])
    for _ in range(2):
        states = [State(rank=rank, world_size=2) for rank in range(2)]
        store = dist.HashStore()
        contexts = [RankAssignmentCtx(state, store, set()) for state in states]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(shared, contexts))
        assert [state.mode for state in states] == [Mode.ACTIVE, Mode.INACTIVE]
        left = RankAssignmentCtx(states[1], store, {0})
        assert (shared(left).state.rank, left.state.world_size) == (0, 1)


def test_a_users_own_assignment_runs_as_it_is() -> None:
    class Reversed(RankAssignment):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            ctx.state.rank = ctx.state.world_size - 1 - ctx.state.rank
            return ctx

    state = State(rank=0, world_size=4)
    assign(Reversed(), RankAssignmentCtx(state, dist.HashStore(), set()))
    assert (state.rank, state.active_rank, state.active_world_size) == (3, 3, 4)
    assert state.mode is Mode.ACTIVE
