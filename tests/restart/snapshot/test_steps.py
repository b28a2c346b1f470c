"""The step that a training loop tells: which snapshot is the newest, and what is no step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import distributed as dist

from ncclops.restart import _calls
from ncclops.restart._store.client import Connection, StoreClient
from ncclops.restart.snapshot import Restored, SnapshotError, Snapshots
from ncclops.restart.state import State
from ncclops.worker import in_process


@pytest.fixture
def store() -> dist.Store:
    """A server in this process: one rank, without a wrapped function."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Training:
    """Of one rank, in one process: ``restore`` begins the next iteration, with new objects."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self.store, self.name, self.iteration = store, name, 0

    def restore(self, **options: Any) -> Restored:
        self.value = torch.zeros(())
        self.iteration += 1
        self.snapshots = Snapshots(
            {"value": self.value},
            every=1,
            store=dist.PrefixStore(f"{self.iteration}", self.store),
            name=self.name,
            **options,
        )
        return self.snapshots.restore()

    def take(self, step: Any, value: float) -> None:
        self.value.fill_(value)
        assert self.snapshots.take(step)
        assert self.snapshots.wait()


def test_a_step_that_is_gone_back_to_is_newer_than_those_that_were_given_up(
    store: dist.Store,
) -> None:
    """After a spike of the loss a loop goes on from a checkpoint of its own."""
    training = Training(store, "back")
    training.restore()
    training.take(7, 1.0)
    training.take(3, 2.0)
    assert training.restore().step == 3
    assert training.value.item() == 2.0


def test_of_two_snapshots_of_one_step_the_last_is_restored(store: dist.Store) -> None:
    """A loop that counts epochs: all ranks have to take the same of the two."""
    training = Training(store, "same")
    training.restore()
    training.take(1, 1.0)
    (first,) = training.snapshots._now.memory.own()  # type: ignore[union-attr]
    training.take(1, 2.0)
    newest, _ = training.snapshots._now.memory.own()  # type: ignore[union-attr]
    assert first.label is not None
    assert newest.label is not None
    assert newest.label.moment > first.label.moment
    assert training.restore().step == 1
    assert training.value.item() == 2.0


@pytest.mark.parametrize("step", [numpy.int64(3), torch.tensor(3)])
def test_a_step_of_numpy_or_torch_is_restored(store: dist.Store, step: Any) -> None:
    training = Training(store, f"kind-{type(step).__name__}")
    training.restore()
    training.take(step, 5.0)
    restored = training.restore()
    assert (restored.step, training.value.item()) == (3, 5.0)
    loads = Training(store, f"checkpoint-{type(step).__name__}")
    assert loads.restore(checkpoint=lambda: step).step == 3


def test_a_step_that_is_no_whole_number_is_refused(store: dist.Store) -> None:
    training = Training(store, "float")
    training.restore()
    with pytest.raises(TypeError, match=r"take\(1\.5\): give how many steps are done"):
        training.snapshots.take(1.5)  # type: ignore[arg-type]


def test_that_nothing_in_memory_could_be_restored_is_a_warning(
    store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(store, "damaged")
    training.restore()
    assert not caplog.records, "nothing was there yet"
    training.take(4, 1.0)
    training.snapshots._now.memory.own()[0].buffer[0] += 1  # type: ignore[union-attr]
    assert training.restore().step is None
    assert [each.levelname for each in caplog.records] == ["WARNING"] * 2
    assert "passed over" in caplog.records[-1].message


@pytest.fixture
def call(store: dist.Store) -> Iterator[_calls.Call]:
    """Of a wrapped function, on the only rank."""
    state = State(0, 1, active_rank=0, active_world_size=1).freeze()
    made = _calls.Call(
        lambda: state, lambda: StoreClient(Connection(store)), lambda: False, nullcontext
    )
    _calls.begin(made)
    yield made
    _calls.end(made)


def test_how_far_a_function_has_come_is_known_by_its_snapshots(call: _calls.Call) -> None:
    """A script that takes them, and sends no receipts, would be said to make no steps."""
    snapshots = Snapshots({"value": torch.zeros(())}, every=10)
    snapshots.restore()
    assert in_process._progress(0) == (None, None)
    for step in (6, 7, 3):  # it goes back
        snapshots.take(step)
    assert in_process._progress(0) == (7, None)


def test_two_that_restore_different_steps_are_a_warning(
    call: _calls.Call, caplog: pytest.LogCaptureFixture
) -> None:
    both = [Snapshots({"value": torch.zeros(())}, every=1, name=name) for name in "ab"]
    both[0].restore()
    both[0].take(3)
    assert both[0].wait()
    call.state = State(0, 1, iteration=1, active_rank=0, active_world_size=1).freeze
    both[0].restore()
    assert not caplog.records
    both[1].restore()
    assert "'b' restored step None, and 'a' step 3: take both" in caplog.text


@pytest.mark.parametrize("goes_on", [True, False])
def test_modules_that_go_on_train_again_after_a_fault_in_an_evaluation(
    call: _calls.Call, store: dist.Store, goes_on: bool
) -> None:
    """A part that is frozen stays so. What is made anew is as it was made."""
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.BatchNorm1d(2))
    model[1].eval()
    first = Snapshots({"model": model}, every=1)
    first.restore()
    model[0].eval()
    model[1].train()
    first.take(1)
    assert first.wait()
    model.train()
    call.state = State(0, 1, iteration=1, active_rank=0, active_world_size=1).freeze
    call.goes_on = goes_on
    assert Snapshots({"model": model}).restore().step == 1
    assert [each.training for each in model] == [not goes_on, True]


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_optimizer_that_has_got_groups_since_is_refused_and_objects_that_go_on_are_made_anew(
    call: _calls.Call, goes_on: bool
) -> None:
    """They would meet the same snapshot again and again."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    first = Snapshots({"optimizer": optimizer}, every=1)
    first.restore()
    first.take(1)
    assert first.wait()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    call.state = State(0, 1, iteration=1, active_rank=0, active_world_size=1).freeze
    call.goes_on = goes_on
    with pytest.raises(SnapshotError, match=r"'optimizer' does not .* before restore\(\)"):
        Snapshots({"optimizer": optimizer}).restore()
    assert call.begins_anew == goes_on


@pytest.mark.usefixtures("call")
def test_a_second_restore_in_an_iteration_needs_another_name() -> None:
    """Some ranks would read what was agreed on the first time: they went on at other steps."""
    Snapshots({"value": torch.zeros(())}).restore()
    with pytest.raises(SnapshotError, match="told apart by name="):
        Snapshots({"value": torch.zeros(())}).restore()
    Snapshots({"value": torch.zeros(())}, name="second").restore()
