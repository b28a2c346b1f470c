"""RetryController: when it lets a job go on and what it says when not."""

from __future__ import annotations

from typing import Any

import pytest

from ncclops.restart.compose import Compose
from ncclops.restart.exception import RestartAbort
from ncclops.restart.initialize import Initialize, RetryController
from ncclops.restart.state import FrozenState, State


def state(iteration: int = 0, world_size: int = 8, active: int | None = 8) -> FrozenState:
    return State(0, world_size, None, active, iteration=iteration).freeze()


def test_by_default_any_number_of_restarts_is_allowed() -> None:
    frozen = state(iteration=10_000, world_size=1, active=1)
    assert RetryController()(frozen) is frozen


@pytest.mark.parametrize(
    ("controller", "last_allowed", "first_refused", "named"),
    [
        (RetryController(max_iterations=3), state(2), state(3), r"state\.iteration=3 .*=3"),
        (
            RetryController(min_world_size=6),
            state(world_size=6, active=2),
            state(world_size=5),
            r"state\.world_size=5 .*min_world_size=6",
        ),
        (
            RetryController(min_active_world_size=4),
            state(active=4),
            state(active=3),
            r"state\.active_world_size=3 .*min_active_world_size=4",
        ),
        (RetryController(), state(), state(active=0), r"state\.active_world_size=0"),
    ],
)
def test_the_limits(
    controller: RetryController, last_allowed: FrozenState, first_refused: FrozenState, named: str
) -> None:
    assert controller(last_allowed) is last_allowed
    with pytest.raises(RestartAbort, match=named):
        controller(first_refused)


@pytest.mark.parametrize("name", ["max_iterations", "min_world_size", "min_active_world_size"])
@pytest.mark.parametrize("limit", ["5", 1.5, [1]])
def test_a_limit_of_the_wrong_type_is_refused_before_any_restart(name: str, limit: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer, not "):
        RetryController(**{name: limit})


def test_all_reasons_are_given() -> None:
    with pytest.raises(RestartAbort, match=r"state\.iteration=5.*; state\.world_size=1"):
        RetryController(max_iterations=5, min_world_size=2)(state(5, world_size=1))


def test_a_state_before_any_assignment_is_judged_by_what_it_has() -> None:
    frozen = state(active=None)
    assert RetryController(min_active_world_size=4)(frozen) is frozen


def test_the_abort_is_no_exception_that_would_be_retried() -> None:
    with pytest.raises(RestartAbort) as caught:
        RetryController(max_iterations=0)(state())
    assert not isinstance(caught.value, Exception)


def test_initializers_compose() -> None:
    both = Compose(RetryController(max_iterations=2), RetryController(min_world_size=2))
    assert isinstance(both, Initialize)
    assert both(state(1)) == state(1)
    with pytest.raises(RestartAbort):
        both(state(2))
