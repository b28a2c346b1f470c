"""Which functions a Wrapper takes, and from where they may be called."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Optional, cast

import pytest
import torch.distributed

from ncclops import restart as inprocess
from ncclops.restart.param_utils import bind_injected, parameters_of_type


async def asynchronous() -> None: ...


def generating() -> Iterator[int]:
    yield 1


async def generating_asynchronously() -> AsyncIterator[int]:
    yield 1


class AsynchronousTrainer:
    async def __call__(self) -> None: ...


class Trainer:
    def __call__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (asynchronous, "asynchronous is an async function"),
        (functools.partial(asynchronous), "async function"),
        (AsynchronousTrainer(), "async function"),
        (generating, "generating is a generator function"),
        (generating_asynchronously, "generator function"),
    ],
)
def test_a_function_that_runs_nothing_when_called_is_refused_at_decoration(
    function: Callable[[], Any], kind: str
) -> None:
    with pytest.raises(TypeError, match=f"{kind}.*nothing could be restarted; wrap a function"):
        inprocess.Wrapper()(function)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Trainer(), r"Wrapper takes no function: write @Wrapper\(\) above it, with brackets"),
        (3, "Wrapper takes keywords only: write the name of a parameter before 3"),
    ],
)
def test_a_decorator_without_brackets_is_refused(given: Any, says: str) -> None:
    wrapper: Any = inprocess.Wrapper
    with pytest.raises(TypeError, match=says):
        wrapper(given)


@functools.wraps(asynchronous)
def running_asynchronous() -> None:
    asyncio.run(asynchronous())


@pytest.mark.parametrize("function", [running_asynchronous, Trainer(), Trainer().__call__, print])
def test_what_runs_when_called_is_taken(function: Callable[[], Any]) -> None:
    assert callable(inprocess.Wrapper()(function))


Alias = inprocess.CallWrapper


def with_text_inside(call: Optional["Alias"] = None) -> None: ...  # noqa: UP037, UP045


def with_a_note(call: Annotated[Alias, "filled in"]) -> None: ...


def with_an_alias(number: int, call: Alias) -> None: ...


@pytest.mark.parametrize(
    "function", [with_text_inside, with_a_note, with_an_alias, functools.partial(with_an_alias, 1)]
)
def test_the_parameter_to_fill_in_is_found_however_it_is_annotated(
    function: Callable[..., Any],
) -> None:
    assert parameters_of_type(function, inprocess.CallWrapper) == ["call"]


def test_a_disabled_wrapper_takes_anything() -> None:
    assert inprocess.Wrapper(enabled=False)(asynchronous) is asynchronous


def test_a_call_outside_the_main_thread_is_refused() -> None:
    entered: list[bool] = []
    wrapped = inprocess.Wrapper()(lambda: entered.append(True))
    errors: list[BaseException] = []

    def call() -> None:
        try:
            wrapped()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="trainer")
    thread.start()
    thread.join(60)
    (error,) = errors
    assert "was called in thread 'trainer': call it in the main thread" in str(error)
    assert not entered


def test_a_group_that_an_earlier_call_has_left_is_refused_and_how_it_ends_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"an earlier call has left .* destroy_process_group"):
        inprocess.Wrapper()(lambda: None)()


def test_wrong_arguments_of_a_function_with_a_parameter_to_fill_in_name_the_function() -> None:
    with pytest.raises(TypeError, match=r"^with_an_alias\(\): missing a required argument: 'num"):
        bind_injected(with_an_alias, ["call"], None, (), {})


def test_a_call_without_an_argument_is_refused_before_anything_runs() -> None:
    """The function would be called, and fail, in each restart anew."""
    entered: list[object] = []

    def train(call, steps=1):  # type: ignore[no-untyped-def]
        entered.append(call)

    told = r"train\(\): missing a required argument: 'call'; if it is to get the CallWrapper, "
    with pytest.raises(TypeError, match=f"{told}annotate it: call: CallWrapper$"):
        inprocess.Wrapper()(cast(Any, train))()
    with pytest.raises(TypeError, match=r"train\(\): got an unexpected keyword argument 'lr'$"):
        bind_injected(train, [], None, (1,), {"lr": 2})
    assert not entered


@functools.wraps(with_an_alias)
def filling_in(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def declaring(*args: Any) -> Any:
    return args


declaring.__signature__ = inspect.signature(with_an_alias)  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [filling_in, declaring, functools.partial(max, 1)])
def test_a_function_whose_signature_is_not_its_own_is_called_as_it_is(
    function: Callable[..., Any],
) -> None:
    """As a decorator may fill in what the function that it decorates takes."""
    assert bind_injected(function, [], None, (2,), {})() in (((2,), {}), (2,), 2)
