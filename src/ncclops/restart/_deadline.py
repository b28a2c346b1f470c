"""Running a call that may hang, with a deadline."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from ncclops.restart.exception import TimeoutError  # noqa: A004 - that is its public name

T = TypeVar("T")

_MEANWHILE_EVERY_S = 1.0


def run_within(
    timeout: timedelta,
    what: str,
    function: Callable[[], T],
    *,
    meanwhile: Callable[[], object] = lambda: None,
) -> T:
    """The result of ``function()``, called in a separate daemon thread.

    Its exception is raised here. Raises ``exception.TimeoutError`` naming ``what`` when it takes
    longer; the thread then goes on by itself, because a call into a driver cannot be ended.
    Where CUDA is in use the thread works on the caller's current device. ``meanwhile`` is called
    every second until then, and what it raises ends the wait.
    """
    call = _Call(function, current_cuda_device())
    threading.Thread(target=call.run, name=f"ncclops-{what}", daemon=True).start()
    until = time.monotonic() + timeout.total_seconds()
    while not call.done.wait(max(0.0, min(_MEANWHILE_EVERY_S, until - time.monotonic()))):
        if time.monotonic() >= until:
            raise TimeoutError(f"{what} took longer than {timeout.total_seconds():g} s")
        meanwhile()
    if call.error is not None:
        raise call.error
    return call.result


def current_cuda_device() -> int | None:
    """The caller's CUDA device, or ``None`` where this process has no CUDA context so far, or one
    that does not answer after an error.

    Never makes one: it would cost hundreds of MiB of GPU memory and time in the restart.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        device: int = torch.cuda.current_device()
    except RuntimeError:
        return None
    return device


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T], cuda_device: int | None) -> None:
        self.function = function
        self.cuda_device = cuda_device
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.result: T

    def run(self) -> None:
        try:
            if self.cuda_device is not None:
                sys.modules["torch"].cuda.set_device(self.cuda_device)
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
            self.error = error
        finally:
            self.done.set()
