"""ThreadedFinalize: a clean-up that may hang does not hang the restart."""

from __future__ import annotations

import builtins
import threading
from datetime import timedelta
from typing import Any

import pytest

from ncclops.restart.compose import Compose
from ncclops.restart.exception import RestartError
from ncclops.restart.exception import TimeoutError as RestartTimeoutError
from ncclops.restart.finalize import Finalize, ThreadedFinalize
from ncclops.restart.state import State

FROZEN = State(rank=0, world_size=1).freeze()
PATIENCE = timedelta(seconds=30)


def test_the_function_gets_its_arguments_in_another_thread() -> None:
    calls = []

    def clean(*args: int, **kwargs: int) -> None:
        calls.append((args, kwargs, threading.current_thread() is threading.main_thread()))

    assert ThreadedFinalize(PATIENCE, clean, (1, 2), {"third": 3})(FROZEN) is FROZEN
    assert calls == [((1, 2), {"third": 3}, False)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"timeout": 30}, r"timeout must be timedelta, not 30; write timedelta\(seconds=30\)"),
        ({"timeout": "30s"}, "timeout must be timedelta, not '30s'"),
        ({"fn": 3}, "fn must be a function, not 3"),
        ({"args": "model"}, r"args must be a tuple; write \('model',\)"),
    ],
)
def test_what_would_fail_after_a_fault_is_refused_at_once(given: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"ThreadedFinalize: {says}"):
        ThreadedFinalize(**({"timeout": PATIENCE, "fn": print} | given))


def test_it_can_be_called_in_every_iteration() -> None:
    calls: list[int] = []
    finalize = ThreadedFinalize(PATIENCE, calls.append, (1,))
    finalize(FROZEN)
    finalize(FROZEN)
    assert calls == [1, 1]


def test_a_late_function_is_named() -> None:
    release = threading.Event()

    def stuck_in_driver() -> None:
        release.wait(60)

    try:
        with pytest.raises(RestartTimeoutError, match=r"stuck_in_driver .*0\.05 s") as caught:
            ThreadedFinalize(timedelta(milliseconds=50), stuck_in_driver)(FROZEN)
    finally:
        release.set()
    assert isinstance(caught.value, builtins.TimeoutError)
    assert isinstance(caught.value, RestartError)


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3)])
def test_what_the_function_raises_is_raised(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        ThreadedFinalize(PATIENCE, fail)(FROZEN)
    assert caught.value is error


def test_finalizers_compose() -> None:
    order: list[str] = []
    both = Compose(
        ThreadedFinalize(PATIENCE, order.append, ("second",)),
        ThreadedFinalize(PATIENCE, order.append, ("first",)),
    )
    assert isinstance(both, Finalize)
    both(FROZEN)
    assert order == ["first", "second"]
