"""What an interrupted context manager of torch leaves in force, and how that is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ncclops.restart._torch_state import TorchState

from .conftest import Job
from .test_faults import causes


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def observed() -> tuple[object, ...]:
    """What torch computes, and what it computes it with."""
    product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return product.dtype, product.device, product.requires_grad, depth, len(modes), has_hooks()


def has_hooks() -> bool:
    """Whether hooks are called with the tensors that autograd saves."""
    with torch.enable_grad():
        saved: Any = torch.ones(1, device="cpu", requires_grad=True).exp().grad_fn
    try:
        saved._raw_saved_result.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError:  # it has some
        return True
    return False


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    state = TorchState()
    yield
    state.restore()


@pytest.mark.parametrize(
    "manager",
    [
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
        FunctionMode(),
        DispatchMode(),
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ],
    ids=["no-grad", "autocast", "device", "function-mode", "dispatch-mode", "saved-tensors"],
)
def test_a_manager_that_was_not_left_has_no_effect_any_more(
    manager: AbstractContextManager[object],
) -> None:
    state, before = TorchState(), observed()
    manager.__enter__()
    assert observed() != before
    state.restore()
    assert observed() == before


def test_what_was_in_force_at_the_call_stays_so() -> None:
    with torch.no_grad(), torch.device("meta"), FunctionMode(), DispatchMode():
        state, before = TorchState(), observed()
        torch.set_grad_enabled(True)
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        state.restore()
        assert observed() == before


def test_hooks_that_were_in_force_at_the_call_stay() -> None:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        TorchState().restore()
        assert has_hooks()
    assert not has_hooks()


def test_a_mode_whose_exit_was_cut_short_is_left() -> None:
    state, before = TorchState(), observed()
    mode = DispatchMode()
    mode.__enter__()
    mode.old_dispatch_mode_flags.clear()  # what __exit__ takes first
    state.restore()
    assert observed() == before


def test_the_default_device_that_a_program_sets_stays() -> None:
    state = TorchState()
    try:
        torch.set_default_device("meta")
        state.restore()
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)


def test_the_next_iteration_computes_what_the_first_would_have(job: Job) -> None:
    assert job.start(2, "fault_programs:leaving_modes_in_force").wait() == {0: 0, 1: 0}
    assert causes(job) == {("exception", 0)}
