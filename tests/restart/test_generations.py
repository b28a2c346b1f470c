"""Who is to come back, and what those who join a generation know of it: values alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclops.record import variables
from ncclops.restart.agreement import Agreement
from ncclops.restart.attribution import Fault, FaultKind
from ncclops.restart.generations import Generation, to_return
from ncclops.restart.raised import Raised
from ncclops.restart.state import RETURNING, Mode, State, take_returning


def loss(rank: int, kind: FaultKind = FaultKind.DIED, **fields: Any) -> Fault:
    return Fault(kind, rank, rank, 0, at=0.0, summary="", gone=True, **fields)


@pytest.mark.parametrize(
    ("lost", "returns"),
    [
        (loss(1), True),
        (loss(1, FaultKind.LEFT, raised=Raised("SystemExit")), True),
        (loss(1, FaultKind.FINALIZE), True),
        (loss(1, FaultKind.HEALTH_CHECK, raised=Raised("CudaContextLost")), True),
        (loss(1, FaultKind.HEALTH_CHECK, raised=Raised("GpuUnusable")), False),
        (loss(1, FaultKind.LOST), False),
        (loss(1, FaultKind.DISCARDED), False),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_for_whom_a_new_process_is_waited_for(lost: Fault, returns: bool) -> None:
    expected = {1} if returns else set[int]()
    assert to_return([lost], (), waits=True, returned=False) == expected
    assert to_return([lost], (), waits=False, returned=False) == set()


def test_a_process_that_is_there_comes_back_however_its_rank_was_lost() -> None:
    lost = [loss(1, FaultKind.LOST)]
    assert to_return(lost, [1, 2], waits=False, returned=False) == {1, 2}


def test_nobody_comes_back_where_the_work_may_be_done_or_no_restart_helps() -> None:
    assert to_return([loss(1)], [1], waits=True, returned=True) == set()
    given_up = loss(2, FaultKind.LEFT, raised=Raised("RestartAbort", ("RestartError",)))
    assert to_return([loss(1), given_up], [1], waits=True, returned=False) == set()


AGREEMENT = Agreement(
    6,
    gone=frozenset({1, 2, 5}),
    lost=frozenset({1, 2}),
    terminated=frozenset({1, 2}),
    faults=(loss(1), loss(2)),
    faulty=(1, 2),
    returning=frozenset({1}),
)


def test_the_generation_after_an_agreement() -> None:
    following = Generation(3, 2).after(AGREEMENT, incidents_from=4)
    assert following == Generation(4, 7, frozenset({2, 5}), frozenset({1}), 4)
    assert Generation.from_json(following.to_json()) == following


def test_an_agreement_is_the_same_behind_the_store() -> None:
    assert Agreement.from_json(AGREEMENT.to_json()) == AGREEMENT
    assert AGREEMENT.in_brief().returning == {1}
    assert (
        Agreement.from_json(replace(AGREEMENT, returning=frozenset()).to_json()).returning == set()
    )


def test_a_rank_that_joins_anew_is_as_at_launch_in_a_later_iteration() -> None:
    state = State(1, 3, active_rank=1, active_world_size=3, initial_rank=2, initial_world_size=4)
    state.mode, state.iteration = Mode.ACTIVE, 4
    state.fn_exception = ValueError()
    state.join_anew(5)
    assert state == State(2, 4, iteration=5)


def test_a_process_takes_a_place_only_once_and_under_the_launchers_name() -> None:
    environ = {variables.RETURNING: "1"}
    assert variables.RETURNING == RETURNING
    assert take_returning(environ)
    assert not take_returning(environ)
