"""What torch keeps for the main thread, put back before each iteration.

A context manager that is interrupted in its own ``__enter__`` or ``__exit__``, or that restores
nothing after an exception, leaves its mode in force: gradients stay off, autocast on, a stream
current. The next iteration would compute something else, and as a rule no error would say so.

This module knows what torch's own context managers use, as ``_groups.tables`` knows its
tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ncclops.restart.log import logged

_DEVICE_TYPES = ("cpu", "cuda")


class TorchState:
    """The state of the thread that makes this object, as it was then.

    What a program sets for good is left as it is: the default device, the default type.
    """

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _DEVICE_TYPES
        }
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._autocast_depth = _autocast_depth()
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = _get_current_dispatch_mode_stack()
        self._hooks = _saved_tensor_hooks()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Put it back. In the same thread."""
        with logged("restoring torch's modes"):
            self._restore_modes()
            self._restore_autocast()
            while _saved_tensor_hooks() not in (None, self._hooks):
                torch._C._autograd._pop_saved_tensors_default_hooks()
            torch.set_grad_enabled(self._gradients)
        with logged("restoring the current CUDA stream"):
            if torch.cuda.is_initialized():
                torch.cuda.set_stream(self._stream or torch.cuda.default_stream())

    def _restore_modes(self) -> None:
        _leave_modes(
            _get_current_function_mode_stack,
            [*self._function_modes, _default_device()],
            torch._C._pop_torch_function_stack,
        )
        _leave_modes(
            _get_current_dispatch_mode_stack,
            self._dispatch_modes,
            lambda: torch._C._pop_torch_dispatch_stack(None),
        )

    def _restore_autocast(self) -> None:
        for _ in range(_autocast_depth() - self._autocast_depth):
            torch.autocast_decrement_nesting()
        if not self._autocast_depth:
            torch.clear_autocast_cache()  # of weights, as they were before the last step
        torch.set_autocast_cache_enabled(self._caches_casts)
        for kind, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def _leave_modes(
    present: Callable[[], Sequence[Any]], known: Sequence[Any], pop: Callable[[], object]
) -> None:
    """Leave all modes on a stack that are not ``known``, the innermost first."""
    depth = sum(any(mode is one for one in known) for mode in present())
    for mode in reversed(present()):
        if not any(mode is one for one in known):
            with contextlib.suppress(Exception):  # its own __exit__ may have been cut short
                mode.__exit__(None, None, None)
    while len(present()) > depth:
        pop()


def _autocast_depth() -> int:
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _default_device() -> Any:
    """The mode of ``torch.set_default_device``; ``None`` without one."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _saved_tensor_hooks() -> Any:
    """The innermost hooks for saved tensors; ``None`` without any."""
    innermost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return innermost(True) if innermost is not None else _some_saved_tensor_hooks()


def _some_saved_tensor_hooks() -> bool | None:
    """For torch before 2.8, which does not name them: a tensor saved with hooks takes no others."""
    try:
        with torch.enable_grad():
            saved: Any = torch.ones((), device="cpu", requires_grad=True).exp().grad_fn
        if saved is not None:  # as in inference mode
            saved._raw_saved_result.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except Exception:  # noqa: BLE001 - or the hooks themselves have raised
        return True
    return None
