"""Lines for an outer restarter: who writes them, when, and in what form."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from ncclops.restart.abort import Abort
from ncclops.restart.completion import Completion
from ncclops.restart.compose import Compose
from ncclops.restart.initialize import Initialize, RetryController
from ncclops.restart.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterCallback,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from ncclops.restart.state import FrozenState, State
from ncclops.restart.terminate import Terminate

PREFIX = "[NestedRestarter] name=[InProcess]"


def state(rank: int = 0, iteration: int = 0) -> FrozenState:
    return State(rank=rank, world_size=4, iteration=iteration).freeze()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="ncclops.restart")
    return lambda: [record.message for record in caplog.records]


@pytest.mark.parametrize(
    ("callback", "kind", "said"),
    [
        (NestedRestarterHandlingCompleted(), Initialize, "state=handling stage=completed"),
        (NestedRestarterHandlingStarting(), Abort, "state=handling stage=starting"),
        (NestedRestarterFinalized(), Completion, "state=finalized"),
        (NestedRestarterAborted(), Terminate, "state=aborted"),
    ],
)
def test_what_each_callback_logs(
    callback: NestedRestarterCallback, kind: type, said: str, lines: Callable[[], list[str]]
) -> None:
    assert isinstance(callback, kind)
    frozen = state(iteration=1)
    assert callback(frozen) is frozen
    assert lines() == [f"{PREFIX} {said}"]


def test_the_first_iteration_is_no_restart(lines: Callable[[], list[str]]) -> None:
    completed = NestedRestarterHandlingCompleted()
    for iteration in range(3):
        completed(state(iteration=iteration))
    assert lines() == [
        f"{PREFIX} state=initialize",
        f"{PREFIX} state=handling stage=completed",
        f"{PREFIX} state=handling stage=completed",
    ]


def test_one_rank_logs_for_all(lines: Callable[[], list[str]]) -> None:
    for rank in range(4):
        NestedRestarterHandlingStarting(special_rank=2)(state(rank))
        NestedRestarterHandlingCompleted(special_rank=2)(state(rank))
    assert lines() == [f"{PREFIX} state=handling stage=starting", f"{PREFIX} state=initialize"]


def test_the_rank_that_logs_is_the_one_with_the_number_now(
    lines: Callable[[], list[str]],
) -> None:
    """The process that was rank 0 at launch may be the one that was lost."""
    successor = State(rank=0, world_size=3, initial_rank=1, initial_world_size=4, iteration=1)
    NestedRestarterHandlingCompleted()(successor.freeze())
    assert lines() == [f"{PREFIX} state=handling stage=completed"]


def test_a_users_own_states_and_logger(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("a.users.own")
    with caplog.at_level(logging.INFO, logger=logger.name):
        NestedRestarterCallback("draining", "queue", logger, special_rank=1)(state(rank=1))
    assert [(r.name, r.message) for r in caplog.records] == [
        (logger.name, f"{PREFIX} state=draining stage=queue")
    ]


def test_completed_is_logged_after_all_other_callbacks(lines: Callable[[], list[str]]) -> None:
    """As the guide has it: listed first, hence run last."""
    initialize = Compose(NestedRestarterHandlingCompleted(), RetryController(max_iterations=1))
    assert isinstance(initialize, Initialize)
    initialize(state())
    with pytest.raises(BaseException, match="no further restart"):
        initialize(state(iteration=1))
    assert lines() == [f"{PREFIX} state=initialize"]
