"""The composable rank assignments and the global plan, by example."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.restart._assignment.planning import PlannedAssigner
from ncclops.restart._assignment.world import (
    AssignmentFailed,
    NoPlace,
    Place,
    decode_place,
    encode_places,
)
from ncclops.restart.agreement import Agreement
from ncclops.restart.compose import Compose
from ncclops.restart.exception import RestartError
from ncclops.restart.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    MaxActiveWorldSize,
    Placement,
    PlannedAssignment,
    RankAssignment,
    RankAssignmentCtx,
    RankFilter,
    ShiftRanks,
    Tree,
    World,
    keys_change,
    local_keys,
    placements,
    plan,
    supports_global_plan,
)
from ncclops.restart.state import Mode, State

EIGHT = World(tuple(range(8)))
# The figure of the API reference: ranks 1, 4 and 5 of eight are lost.
FIGURE = EIGHT.losing([1, 4, 5])


def with_keys(world: World, assignment: RankAssignment) -> World:
    """``world`` with the keys that its living ranks would report."""
    states = {rank: State(rank=rank, world_size=len(world)) for rank in world.alive}
    return world.with_keys(
        {world.initial_ranks[rank]: local_keys(assignment, s) for rank, s in states.items()}
    )


def test_shift_ranks_as_in_the_figure() -> None:
    assert plan(ShiftRanks(), FIGURE).initial_ranks == (0, 2, 3, 6, 7)


def test_fill_gaps_as_in_the_figure() -> None:
    assert plan(FillGaps(), FIGURE).initial_ranks == (0, 6, 2, 3, 7)


def test_filter_count_grouped_by_key_as_in_the_figure() -> None:
    """Groups of two, of which only those with both ranks alive may stay."""
    assignment = Compose(
        ShiftRanks(),
        FilterCountGroupedByKey(lambda state: state.rank // 2, condition=lambda count: count == 2),
    )
    assert plan(assignment, with_keys(FIGURE, assignment)).initial_ranks == (2, 3, 6, 7)


def test_the_guides_composition_drops_whole_nodes() -> None:
    """The last listed runs first: nodes with a loss go, the rest shifts, all are active."""
    assignment = Compose(
        ActivateAllRanks(),
        ShiftRanks(),
        FilterCountGroupedByKey(
            key_or_fn=lambda state: state.rank // 8, condition=lambda count: count == 8
        ),
    )
    world = with_keys(World(tuple(range(32))).losing([9]), assignment)
    after = plan(assignment, world)
    assert after.initial_ranks == (*range(8), *range(16, 32))
    assert after.active == 24


@pytest.mark.parametrize(("size", "active"), [(16, 12), (13, 12), (11, 8), (7, 4), (3, 0)])
def test_the_guides_filters_give_the_largest_multiple_below_the_limit(
    size: int, active: int
) -> None:
    assignment = Compose(ActiveWorldSizeDivisibleBy(4), MaxActiveWorldSize(14), ShiftRanks())
    after = plan(assignment, World(tuple(range(16))).losing(range(size, 16)))
    assert (len(after), after.active) == (size, active)


def test_a_reserve_is_activated_when_an_active_rank_is_lost() -> None:
    assignment = Compose(MaxActiveWorldSize(2), ShiftRanks())
    first = plan(assignment, World((0, 1, 2)))
    assert placements(first)[2].mode is Mode.INACTIVE
    second = plan(assignment, first.losing([0]))
    assert placements(second) == {1: Placement(0, 2, 2), 2: Placement(1, 2, 2)}


def test_active_numbers_are_not_carried_over_from_the_last_iteration() -> None:
    """8 in threes are 6; after two losses 6 are left, and after a third 5, of which 3 fit."""
    assignment = Compose(ActiveWorldSizeDivisibleBy(3), ShiftRanks())
    sizes = []
    world = EIGHT
    for lost in ([], [7], [6], [0]):
        world = plan(assignment, world.losing(lost))
        sizes.append(world.active)
    assert sizes == [6, 6, 6, 3]


def test_without_a_filter_all_are_active() -> None:
    """The guides' own example of FilterCountGroupedByKey lists no activation."""
    assert plan(ShiftRanks(), FIGURE).active == 5


def test_no_limit_is_no_limit() -> None:
    assert plan(Compose(MaxActiveWorldSize(None), ShiftRanks()), FIGURE).active == 5


def test_a_world_may_be_left_without_ranks() -> None:
    after = plan(ShiftRanks(), EIGHT.losing(range(8)))
    assert (len(after), after.active, placements(after)) == (0, 0, {})


def test_discarded_ranks_have_no_placement() -> None:
    assert set(placements(plan(ShiftRanks(), FIGURE))) == {0, 2, 3, 6, 7}


def test_dead_ranks_left_in_place_are_an_error_and_the_remedy_is_named() -> None:
    with pytest.raises(RestartError, match=r"\[1, 4, 5\].*ShiftRanks"):
        plan(ActivateAllRanks(), FIGURE)
    assert plan(ActivateAllRanks(), EIGHT).active == 8


def test_living_ranks_without_keys_are_named() -> None:
    assignment = Compose(ShiftRanks(), FilterCountGroupedByKey("all", condition=bool))
    with pytest.raises(RestartError, match=r"initial ranks \[0, 2, 3, 6, 7\]"):
        plan(assignment, FIGURE)
    assert len(plan(assignment, with_keys(FIGURE, assignment))) == 5


def test_each_group_filter_finds_its_own_keys() -> None:
    by_node = FilterCountGroupedByKey(lambda state: state.rank // 4, lambda count: count >= 3)
    by_parity = FilterCountGroupedByKey(lambda state: state.rank % 2, lambda count: count >= 3)
    assignment = Compose(ShiftRanks(), by_parity, by_node)
    # by_node runs first and drops 0..3 (two are lost); of the rest, two are even and two odd.
    assert len(plan(assignment, with_keys(EIGHT.losing([0, 1]), assignment))) == 0
    assert plan(assignment, with_keys(EIGHT.losing([0]), assignment)).initial_ranks == (
        (1, 2, 3, 4, 5, 6, 7)
    )


def test_keys_are_text_and_come_in_the_order_members_run() -> None:
    assignment = Compose(
        ShiftRanks(),
        FilterCountGroupedByKey("constant", bool),
        FilterCountGroupedByKey(lambda state: (state.rank, state.world_size), bool),
    )
    assert local_keys(assignment, State(rank=2, world_size=4)) == ["(2, 4)", "constant"]
    assert local_keys(ShiftRanks(), State(rank=2, world_size=4)) == []


def test_tree_keys_are_those_of_the_launch() -> None:
    tree = Tree([Layer(key_or_fn="root"), Layer(key_or_fn=lambda state: state.rank // 8)])
    state = State(rank=3, world_size=20, initial_rank=17, initial_world_size=32, iteration=2)
    assert local_keys(tree, state) == ["root", "2"]
    assert not keys_change(tree)


def test_keys_of_a_group_filter_are_gathered_each_time() -> None:
    assert keys_change(Compose(ShiftRanks(), FilterCountGroupedByKey("x", bool)))
    assert not keys_change(Compose(ActivateAllRanks(), ShiftRanks()))


GROUPS = FilterCountGroupedByKey("key", bool)


class Own(RankAssignment):
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return ctx


class OwnShift(ShiftRanks):
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return super().__call__(ctx)


class EveryOther(PlannedAssignment, RankFilter):
    """A user's filter with a global form: half of the ranks are active."""

    def plan(self, world: World, column: int = 0) -> World:
        return World(world.initial_ranks, world.dead, active=len(world) // 2, keys=world.keys)


class OwnCompose(Compose):
    def __call__(self, *args: object) -> object:
        return super().__call__(*args)


@pytest.mark.parametrize(
    ("assignment", "supported"),
    [
        (ShiftRanks(), True),
        (Compose(ActivateAllRanks(), Compose(ShiftRanks(), GROUPS)), True),
        (Tree([Layer()]), True),
        (Compose(EveryOther(), ShiftRanks()), True),
        (Own(), False),
        (OwnShift(), False),
        (Compose(ActivateAllRanks(), Own()), False),
        (OwnCompose(ActivateAllRanks(), ShiftRanks()), False),
        # Its key would have to be evaluated on numbers that FillGaps gives out before it.
        (Compose(ShiftRanks(), FilterCountGroupedByKey(str, bool), FillGaps()), False),
    ],
)
def test_which_assignments_can_be_planned_for_all_ranks(
    assignment: RankAssignment, supported: bool
) -> None:
    assert supports_global_plan(assignment) is supported


def test_a_users_own_planned_assignment_takes_part() -> None:
    assert plan(Compose(EveryOther(), ShiftRanks()), FIGURE).active == 2


@pytest.mark.parametrize("use", [lambda a: plan(a, EIGHT), lambda a: local_keys(a, State(0, 1))])
def test_a_users_own_assignment_has_no_plan(use: Callable[[RankAssignment], object]) -> None:
    with pytest.raises(TypeError, match="rank by rank"):
        use(Own())


def test_a_tree_is_not_composed() -> None:
    with pytest.raises(ValueError, match="Tree cannot be composed"):
        supports_global_plan(Compose(ActivateAllRanks(), Tree([Layer()])))


@pytest.mark.parametrize("before", [(), (ActivateAllRanks(),)])
def test_a_group_filter_needs_an_assignment_that_takes_ranks_out(
    before: tuple[RankAssignment, ...],
) -> None:
    with pytest.raises(ValueError, match=r"FilterCountGroupedByKey only marks.*ShiftRanks"):
        supports_global_plan(Compose(*before, FilterCountGroupedByKey("x", bool)))


def test_a_filter_in_the_wrong_place_is_run_last_with_a_warning() -> None:
    assignment = Compose(ShiftRanks(), MaxActiveWorldSize(3))
    with pytest.warns(UserWarning, match="MaxActiveWorldSize chooses active ranks before"):
        assert supports_global_plan(assignment)
    assert plan(assignment, FIGURE).active == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: MaxActiveWorldSize(0),
        lambda: ActiveWorldSizeDivisibleBy(0),
        lambda: Layer(min_ranks=-1),
        lambda: Layer(max_ranks=0),
        lambda: Tree([]),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must|at least"):
        make()


@pytest.mark.parametrize(("value", "key"), [("node7", "node7"), (3, "3"), ((0, 1), "(0, 1)")])
def test_a_key_is_a_value_or_a_function(value: Any, key: str) -> None:
    assignment = FilterCountGroupedByKey(value, bool)
    assert local_keys(assignment, State(rank=5, world_size=8)) == [key]


def test_activating_all_ranks_is_refused_beside_another_filter() -> None:
    """In one order it would undo the other, in the other it would do nothing."""
    both = (ActivateAllRanks(), MaxActiveWorldSize(4))
    for filters in (both, reversed(both)):
        assignment: Any = Compose(*filters, ShiftRanks())
        with pytest.raises(ValueError, match="ActivateAllRanks"):
            supports_global_plan(assignment)


def test_older_two_argument_keys_work_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="key_or_fn"):
        layer_keys = Tree([Layer(key_or_fn="root"), Layer(key_or_fn=lambda rank, _: rank // 8)])
    assert local_keys(layer_keys, State(rank=9, world_size=16)) == ["root", "1"]


def test_a_function_with_a_default_is_no_older_one() -> None:
    assignment = FilterCountGroupedByKey(lambda state, size=2: state.rank // size, bool)
    assert local_keys(assignment, State(rank=5, world_size=8)) == ["2"]


def test_worlds_survive_the_store() -> None:
    world = World((3, 1, 4), frozenset({2}), active=2, surplus=1, keys=(("a", "b"), ("a",), ()))
    assert World.from_json(world.to_json().encode()) == world
    assert World.from_json(EIGHT.to_json()) == EIGHT


PLACES = st.one_of(
    st.builds(Placement, st.integers(0, 9), st.just(9), st.integers(7, 8)),
    st.just(NoPlace()),
    st.builds(AssignmentFailed, st.sampled_from(["ValueError: no", "null", "[0, 1, 1]", ""])),
)


@given(st.dictionaries(st.integers(0, 20), PLACES))
def test_what_ranks_become_survives_the_store(places: dict[int, Place]) -> None:
    runs = json.loads(json.dumps(encode_places(places)))
    assert {rank: decode_place(runs, rank) for rank in places} == places


def test_ranks_that_stay_in_their_order_take_one_entry() -> None:
    places: dict[int, Place] = {rank: Placement(rank - 1, 40, 40) for rank in range(8, 41)}
    assert encode_places(places) == [[8, 40, [7, 40, 40]]]


@pytest.mark.parametrize("runs", [[], [[0, 1, [1, 2]]], [[0, 1, [1, 2, "3"]]], [[0, 1, 7]]])
def test_what_is_no_place_is_refused(runs: list[list[object]]) -> None:
    with pytest.raises(ValueError, match="no place"):
        decode_place(runs, 1)


def test_an_assignment_that_fails_is_raised_on_every_rank_whatever_it_says() -> None:
    def refuse(size: int) -> bool:
        raise ValueError("discarded")

    assignment = Compose(ShiftRanks(), FilterCountGroupedByKey(lambda state: state.rank, refuse))
    assigner = PlannedAssigner(assignment)
    assert assigner.planner is not None
    nothing = Agreement(0, frozenset(), frozenset(), frozenset(), (), ())
    planned = assigner.planner(None, nothing, {0: ("0",), 1: ("1",)})
    for rank in (0, 1):
        with pytest.raises(RestartError, match="rank assignment failed: ValueError: discarded"):
            assigner.assign(State(rank, 2), nothing, planned.placements[rank])


def test_a_placement_fills_the_state_in() -> None:
    state = State(rank=7, world_size=8, iteration=3)
    Placement(rank=2, world_size=6, active_world_size=4).apply_to(state)
    assert (state.rank, state.world_size) == (2, 6)
    assert (state.active_rank, state.active_world_size, state.mode) == (2, 4, Mode.ACTIVE)
    Placement(rank=5, world_size=6, active_world_size=4).apply_to(state)
    assert (state.active_rank, state.active_world_size, state.mode) == (None, 4, Mode.INACTIVE)
    assert (state.initial_rank, state.iteration) == (7, 3)


def test_placements_are_only_read_from_a_planned_world() -> None:
    with pytest.raises(ValueError, match="plan"):
        placements(EIGHT)


def test_assignments_can_be_sent_to_another_process() -> None:
    assignment = Compose(ShiftRanks(), FilterCountGroupedByKey("x", bool, timedelta(seconds=1)))
    copy = pickle.loads(pickle.dumps(assignment))
    assert len(plan(copy, with_keys(FIGURE, copy))) == 5
    assert (
        len(plan(pickle.loads(pickle.dumps(tree := Tree([Layer()]))), with_keys(FIGURE, tree))) == 5
    )


@pytest.mark.slow
def test_planning_needs_no_torch() -> None:
    """The planner may be a small process, and the tests of it stay quick."""
    program = "import ncclops.restart.rank_assignment, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize("layers", [3, Layer()])
def test_the_layers_of_a_tree_are_a_list(layers: Any) -> None:
    with pytest.raises(TypeError, match="the layers of a Tree are a list of Layer objects, not "):
        Tree(layers)
