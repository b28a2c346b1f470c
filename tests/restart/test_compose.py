"""Compose: order, what is handed on, and what a composition is an instance of."""

from __future__ import annotations

import abc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from ncclops.restart.compose import Compose


class Hook(abc.ABC):
    @abc.abstractmethod
    def __call__(self, log: list[str]) -> list[str]: ...


class Named(Hook):
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, log: list[str]) -> list[str]:
        return [*log, self.name]


class Other(Hook):
    def __call__(self, log: list[str]) -> list[str]:
        return [*log, "other"]


class Loud(Named):
    """A second generation, whose nearest relative to Named is Named itself."""


class Forgetful(Hook):
    def __call__(self, log: list[str]) -> list[str]:
        log.append("forgetful")
        return None  # type: ignore[return-value]


def test_the_last_listed_runs_first() -> None:
    assert Compose(Named("a"), Named("b"), Named("c"))([]) == ["c", "b", "a"]


def test_it_is_mathematical_composition() -> None:
    f: Callable[[int], int] = lambda x: x + 1  # noqa: E731
    g: Callable[[int], int] = lambda x: x * 10  # noqa: E731
    assert Compose(f, g)(3) == f(g(3)) == 31


def test_a_tuple_is_spread_over_the_parameters() -> None:
    assert Compose(lambda a, b: a - b, lambda a, b: (b, a))(1, 5) == 4


def test_nothing_composed_hands_back_its_input() -> None:
    assert Compose()(7) == 7
    assert Compose()(7, 8) == (7, 8)
    assert Compose()() is None


def test_callables_without_arguments_may_return_nothing() -> None:
    log: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Compose(lambda: log.append("f"), lambda: log.append("g"))() is None
    assert log == ["g", "f"]


def test_a_forgotten_return_is_named_and_the_chain_goes_on() -> None:
    with pytest.warns(UserWarning, match="Forgetful.*returned None"):
        assert Compose(Named("after"), Forgetful())([]) == ["forgetful", "after"]


def test_a_forgotten_return_at_the_end_yields_none() -> None:
    with pytest.warns(UserWarning, match="Forgetful"):
        assert Compose(Forgetful(), Named("first"))([]) is None


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((Named("a"), Other()), Hook),
        ((Loud("a"), Named("b")), Named),
        ((Named("a"), Loud("b")), Named),
        ((Compose(Named("a"), Other()), Compose(Named("b"), Named("c"))), Hook),
        ((Other(),), Other),
    ],
)
def test_it_is_an_instance_of_the_lowest_common_class(
    members: tuple[Any, ...], expected: type
) -> None:
    composed = Compose(*members)
    assert isinstance(composed, Compose)
    assert isinstance(composed, expected)
    assert type(composed).__mro__[1:3] == (Compose, expected)
    assert composed.instances == members


def test_unrelated_callables_have_only_object_in_common() -> None:
    assert not isinstance(Compose(Named("a"), lambda log: log), Hook)


def test_an_ancestor_that_promises_more_than_a_call_is_passed_over() -> None:
    """A Compose offers ``__call__`` only, so it must not pass for something with a ``plan``."""

    class Planned(Hook):
        @abc.abstractmethod
        def plan(self) -> None: ...

    class One(Planned):
        def plan(self) -> None: ...

        def __call__(self, log: list[str]) -> list[str]:
            return [*log, "one"]

    class Two(One):
        pass

    class Three(Planned):
        def plan(self) -> None: ...

        def __call__(self, log: list[str]) -> list[str]:
            return [*log, "three"]

    assert not isinstance(Compose(Two(), Three()), Planned)
    assert isinstance(Compose(Two(), Three()), Hook)


def test_what_cannot_be_called_is_refused() -> None:
    number: Any = 3
    with pytest.raises(TypeError, match="Compose takes callables, and 3 is not one"):
        Compose(number)
    with pytest.raises(TypeError, match="'text'"):
        Compose(Named("a"), "text")  # type: ignore[arg-type]


def test_exceptions_pass_through_and_end_the_chain() -> None:
    def fail(log: list[str]) -> list[str]:
        raise LookupError("no")

    log: list[str] = []
    with pytest.raises(LookupError):
        Compose(lambda log: log.append("never"), fail)(log)
    assert log == []


def test_it_survives_pickling() -> None:
    """``mp.spawn`` sends the wrapper's callbacks to its children."""
    copy = pickle.loads(pickle.dumps(Compose(Named("a"), Named("b"))))
    assert isinstance(copy, Hook)
    assert copy([]) == ["b", "a"]
