"""State: what callbacks see of a rank."""

from __future__ import annotations

import dataclasses
import os

import pytest

from ncclops.restart.state import FrozenState, Mode, State


def test_initial_numbers_default_to_the_current_ones() -> None:
    state = State(rank=3, world_size=8)
    assert (state.initial_rank, state.initial_world_size) == (3, 8)
    assert (state.active_rank, state.active_world_size) == (None, None)
    assert (state.iteration, state.mode, state.fn_exception) == (0, Mode.INITIALIZED, None)


def test_initial_numbers_that_are_given_are_kept() -> None:
    state = State(rank=1, world_size=6, initial_rank=3, initial_world_size=8)
    assert (state.initial_rank, state.initial_world_size) == (3, 8)


def test_launcher_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "16")
    state = State.from_env()
    assert (state.rank, state.world_size, state.initial_rank) == (5, 16, 5)


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert State.from_env() == State(rank=0, world_size=1)


@pytest.mark.parametrize(
    ("rank", "world_size", "named"),
    [("two", "4", "RANK='two'"), ("4", "4", "RANK=4"), ("-1", "4", "RANK=-1"), ("0", "", "WORLD_")],
)
def test_nonsense_from_the_launcher_is_named(
    monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str, named: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=named):
        State.from_env()


def test_the_function_sees_the_active_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    State(rank=2, world_size=7, active_rank=2, active_world_size=4).set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "4")
    State(rank=6, world_size=7, active_rank=None, active_world_size=4).set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("None", "4")


def test_advance_forgets_the_exception_and_nothing_else() -> None:
    fault = RuntimeError("boom")
    state = State(1, 2, mode=Mode.ACTIVE, active_rank=1, active_world_size=2, fn_exception=fault)
    state.advance()
    assert state.iteration == 1
    assert state.fn_exception is None
    assert (state.mode, state.active_rank) == (Mode.ACTIVE, 1)


def test_frozen_state_has_the_same_fields_and_refuses_assignment() -> None:
    fault = RuntimeError("boom")
    state = State(rank=1, world_size=2, iteration=4, fn_exception=fault)
    frozen = state.freeze()
    names = [field.name for field in dataclasses.fields(State)]
    assert [field.name for field in dataclasses.fields(FrozenState)] == names
    assert all(getattr(frozen, name) is getattr(state, name) for name in names)
    for name in names:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, None)


def test_a_frozen_state_does_not_follow_later_changes() -> None:
    state = State(rank=1, world_size=2)
    frozen = state.freeze()
    state.advance()
    assert frozen.iteration == 0


def test_copy_from_takes_all_fields_or_the_named_ones() -> None:
    source = State(rank=1, world_size=2, iteration=3, mode=Mode.ACTIVE)
    partly, wholly = State(rank=0, world_size=4), State(rank=0, world_size=4)
    partly.copy_from(source, fields=["iteration"])
    assert partly == State(rank=0, world_size=4, iteration=3)
    wholly.copy_from(source.freeze())
    assert wholly == source
    with pytest.raises(ValueError, match="no field iterations"):
        partly.copy_from(source, fields=["iterations"])
