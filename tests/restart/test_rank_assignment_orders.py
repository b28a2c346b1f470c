"""Compositions of two and three members in every order: what is refused, and what becomes of it."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ncclops.restart.compose import Compose
from ncclops.restart.exception import RestartError
from ncclops.restart.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    MaxActiveWorldSize,
    PlannedAssignment,
    RankAssignment,
    RankAssignmentCtx,
    RankFilter,
    ShiftRanks,
    Tree,
    World,
    assign,
    local_keys,
    plan,
    supports_global_plan,
)
from ncclops.restart.state import Mode, State

# Ranks 1, 4 and 5 of eight are lost: of the pairs, those of 2 and 3 and of 6 and 7 are whole.
LOST = (1, 4, 5)
WORLD = World(tuple(range(8))).losing(LOST)


def pairs() -> FilterCountGroupedByKey:
    return FilterCountGroupedByKey(lambda state: state.rank // 2, lambda count: count == 2)


SHIPPED: dict[str, Callable[[], Any]] = {
    "shift": ShiftRanks,
    "fill": FillGaps,
    "all": ActivateAllRanks,
    "max 3": lambda: MaxActiveWorldSize(3),
    "even": lambda: ActiveWorldSizeDivisibleBy(2),
    "pairs": pairs,
    "tree": lambda: Tree([Layer()]),
}
FILTERS = {"all", "max 3", "even"}
RENUMBERING = {"shift", "fill"}
ORDERS = [*itertools.permutations(SHIPPED, 2), *itertools.permutations(SHIPPED, 3)]


def refusal(listed: tuple[str, ...]) -> str | None:
    """What the guides say of a composition: the last listed runs first."""
    if "tree" in listed:
        return "Tree cannot be composed"
    if "all" in listed and len(FILTERS & set(listed)) > 1:
        return "ActivateAllRanks"
    if "pairs" in listed and not RENUMBERING & set(listed[: listed.index("pairs")]):
        return "FilterCountGroupedByKey only marks"
    return None


def complaint(listed: tuple[str, ...]) -> str | None:
    runs = listed[::-1]
    if not RENUMBERING & set(runs):
        return "takes no terminated ranks out"
    first = next((index for index, name in enumerate(runs) if name in FILTERS), len(runs))
    return "chooses active ranks before" if RENUMBERING & set(runs[first:]) else None


def with_keys(world: World, assignment: RankAssignment) -> World:
    states = {rank: State(rank=rank, world_size=len(world)) for rank in world.alive}
    return world.with_keys({rank: local_keys(assignment, s) for rank, s in states.items()})


@contextlib.contextmanager
def expecting(warning: str | None) -> Iterator[None]:
    if warning is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    else:
        with pytest.warns(UserWarning, match=warning):
            yield


@pytest.mark.parametrize("listed", ORDERS, ids="+".join)
def test_every_order_has_a_meaning_or_is_refused(listed: tuple[str, ...]) -> None:
    if (why := refusal(listed)) is not None:
        with pytest.raises(ValueError, match=why):
            supports_global_plan(Compose(*(SHIPPED[name]() for name in listed)))
        return
    assignment = Compose(*(SHIPPED[name]() for name in listed))
    with expecting(complaint(listed)):
        planned = supports_global_plan(assignment)
    runs = listed[::-1]
    if not RENUMBERING & set(runs):
        with pytest.raises(RestartError, match=r"leaves terminated ranks \[1, 4, 5\]"):
            plan(assignment, with_keys(WORLD, assignment))
        return
    # A key that would be evaluated on numbers given out by another member is in no plan.
    late_key = "pairs" in runs and bool(RENUMBERING & set(runs[: runs.index("pairs")]))
    assert planned is not late_key
    if not planned:
        return
    after = plan(assignment, with_keys(WORLD, assignment))
    assert set(after.initial_ranks) == ({2, 3, 6, 7} if "pairs" in runs else {0, 2, 3, 6, 7})
    active = len(after)
    for name in runs:  # filters work on what the ones before them have left
        active = min(active, 3) if name == "max 3" else active
        active = active - active % 2 if name == "even" else active
    assert after.active == active


class Own(RankAssignment):
    """A user's own, of which nothing is known."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return ctx


class OwnFilter(RankFilter):
    """A user's own filter."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        state = ctx.state
        state.active_world_size = 1
        state.active_rank = 0 if state.rank == 0 else None
        state.mode = Mode.ACTIVE if state.rank == 0 else Mode.INACTIVE
        return ctx


class Forgetful(RankAssignment):
    """Has no return statement."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.terminated_ranks.clear()
        return None  # type: ignore[return-value]


class Parity(PlannedAssignment, RankFilter):
    """A user's filter with a plan and with keys: as many active ranks as report ``odd``."""

    @property
    def key_functions(self) -> Any:
        return (lambda state: "odd" if state.rank % 2 else "even",)

    def plan(self, world: World, column: int = 0) -> World:
        odd = sum(keys[column] == "odd" for keys in world.keys)
        return World(world.initial_ranks, world.dead, active=odd, keys=world.keys)


@pytest.mark.parametrize(
    "members",
    [
        (pairs(), Own()),
        (pairs(), OwnFilter(), ShiftRanks()),
        (ActivateAllRanks(), Own(), MaxActiveWorldSize(2), ShiftRanks()),
    ],
)
def test_a_users_own_member_does_not_hide_what_the_shipped_ones_lack(
    members: tuple[Any, ...],
) -> None:
    with pytest.raises(ValueError, match=r"only marks|ActivateAllRanks"):
        supports_global_plan(Compose(*members))


@pytest.mark.parametrize(
    "members",
    [(Own(), pairs()), (OwnFilter(), ActivateAllRanks(), ShiftRanks()), (Own(), ShiftRanks())],
)
def test_what_a_users_own_member_does_is_left_to_it(members: tuple[Any, ...]) -> None:
    with expecting(None):
        assert not supports_global_plan(Compose(*members))


@pytest.mark.parametrize("filter_", [OwnFilter(), MaxActiveWorldSize(1)])
def test_a_choice_that_a_later_renumbering_loses_is_named(filter_: Any) -> None:
    with pytest.warns(UserWarning, match="its choice is lost: list filters first"):
        supports_global_plan(Compose(ShiftRanks(), filter_, Own()))


def test_a_users_filter_finds_its_own_keys_beside_those_of_a_group_filter() -> None:
    """Filters are planned last wherever they are listed, and keys come in that order."""
    assignment = Compose(ShiftRanks(), pairs(), Parity())
    with pytest.warns(UserWarning, match="Parity chooses active ranks before"):
        assert supports_global_plan(assignment)
    after = plan(assignment, with_keys(WORLD, assignment))
    assert (after.initial_ranks, after.active) == ((2, 3, 6, 7), 2)


def context(rank: int = 0) -> RankAssignmentCtx:
    return RankAssignmentCtx(State(rank=rank, world_size=8), dist.HashStore(), set(LOST))


@pytest.mark.parametrize("assignment", [Forgetful(), Compose(Forgetful(), ShiftRanks())])
@pytest.mark.filterwarnings("ignore:.*returned None")
def test_an_assignment_that_returns_nothing_is_named(assignment: Any) -> None:
    with pytest.raises(TypeError, match=r"Forgetful\(\).*returned None.*RankAssignmentCtx"):
        assign(assignment, context())


def test_more_active_ranks_than_are_left_are_refused() -> None:
    """They would wait in ``init_process_group`` for ranks that are gone."""
    with pytest.raises(RestartError, match=r"Own\(\) gives 8 active ranks, and 5 are left"):
        assign(Own(), context())
    assert assign(OwnFilter(), context()).state.active_world_size == 1


@pytest.mark.parametrize(
    ("what", "arguments", "error", "name"),
    [
        (Layer, {"min_ranks": "8"}, TypeError, "min_ranks='8'"),
        (Layer, {"max_ranks": 2.5}, TypeError, "max_ranks=2.5"),
        (Layer, {"flag": "RESERVE"}, TypeError, "flag='RESERVE'"),
        (Tree, {"layers": [Layer(), "host"]}, TypeError, "'host' is none"),
        (Tree, {"layers": [Layer()], "world_size_filter": 8}, TypeError, "world_size_filter=8"),
        (
            MaxActiveWorldSize,
            {"max_active_world_size": "4"},
            TypeError,
            "max_active_world_size='4'",
        ),
        (ActiveWorldSizeDivisibleBy, {"divisor": 2.0}, TypeError, "divisor=2.0"),
        (FilterCountGroupedByKey, {"condition": 8}, TypeError, "condition=8"),
        (FilterCountGroupedByKey, {"condition": bool, "timeout": 60}, TypeError, "timeout=60"),
        (
            FilterCountGroupedByKey,
            {"condition": bool, "timeout": timedelta(0)},
            ValueError,
            "timeout=0:00:00",
        ),
    ],
)
def test_what_would_fail_in_a_restart_is_refused_at_once(
    what: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], name: str
) -> None:
    keys = {"key_or_fn": "x"} if what is FilterCountGroupedByKey else {}
    with pytest.raises(error, match=name):
        what(**keys, **arguments)


@pytest.mark.parametrize("wrong", [4.0, None, "4"])
def test_the_size_filter_returns_a_whole_number(wrong: Any) -> None:
    tree = Tree([Layer()], world_size_filter=lambda _: wrong)
    with pytest.raises(TypeError, match=r"world_size_filter\(5\)=.* must be a whole number"):
        plan(tree, with_keys(WORLD, tree))


def test_whole_numbers_of_other_types_can_be_published() -> None:
    """numpy's integers are no ``int``, and JSON refuses them."""
    numpy = pytest.importorskip("numpy")
    four = numpy.int64(4)
    tree = Tree([Layer(max_ranks=four)], world_size_filter=lambda _: four)
    for assignment in (tree, Compose(MaxActiveWorldSize(four), ShiftRanks())):
        after = plan(assignment, with_keys(WORLD, assignment))
        assert World.from_json(after.to_json()).active == 4
