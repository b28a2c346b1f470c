"""Callbacks that bring a rank back into a state from which the function can start again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ncclops.restart._deadline import run_within
from ncclops.restart.state import FrozenState


class Finalize(ABC):
    """Called in the main thread after the function was left and its groups were aborted.

    An exception it raises means that this rank cannot go on: the health check is skipped, the
    rank leaves with that exception, and the others restart without it.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Clean up; return ``state``, which a ``Compose`` passes on."""


class ThreadedFinalize(Finalize):
    """Runs ``fn(*args, **kwargs)`` in a thread and waits for it no longer than ``timeout``.

    For a clean-up that may hang, such as waiting for GPU work. Where CUDA is in use the thread
    works on the main thread's device. Raises what ``fn`` raises, and ``exception.TimeoutError``
    (also a builtin ``TimeoutError``) when it is late.
    """

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., object],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        # When it is called, after a fault, it would be too late to find out.
        given: Any = timeout
        if not isinstance(given, timedelta):
            more = f"; write timedelta(seconds={given})" if isinstance(given, int | float) else ""
            raise TypeError(f"ThreadedFinalize: timeout must be timedelta, not {given!r}{more}")
        if not callable(fn):
            raise TypeError(f"ThreadedFinalize: fn must be a function, not {fn!r}")
        if isinstance(args, str):
            raise TypeError(f"ThreadedFinalize: args must be a tuple; write ({args!r},)")
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        """Run ``fn`` and return ``state``."""
        name = getattr(self.fn, "__name__", repr(self.fn))
        run_within(self.timeout, f"finalize {name}", lambda: self.fn(*self.args, **self.kwargs))
        return state
