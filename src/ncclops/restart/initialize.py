"""Callbacks at the start of every iteration, the first one included."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import SupportsIndex

from ncclops.restart.exception import RestartAbort
from ncclops.restart.state import FrozenState


class Initialize(ABC):
    """Called in the main thread before the health check that precedes the wrapped function.

    An ``Exception`` it raises is a fault like one in the function: all ranks restart. A
    ``BaseException`` such as ``RestartAbort`` ends this rank, and the others go on without it.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Prepare for the iteration; return ``state``, which a ``Compose`` passes on."""


class RetryController(Initialize):
    """Stops restarting after too many iterations or with too few ranks left.

    Raises ``RestartAbort`` when ``iteration >= max_iterations`` (``None``: no limit), when
    fewer than ``min_world_size`` healthy ranks or fewer than ``min_active_world_size`` active
    ones remain. All ranks see the same numbers, hence all of them stop.

    Raises ``TypeError`` for what is no integer.
    """

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
    ) -> None:
        limits = {
            "max_iterations": 0 if max_iterations is None else max_iterations,
            "min_world_size": min_world_size,
            "min_active_world_size": min_active_world_size,
        }
        for name, limit in limits.items():  # at the first restart it would be too late to find out
            if not isinstance(limit, SupportsIndex):
                raise TypeError(f"RetryController: {name} must be an integer, not {limit!r}")
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        """Return ``state`` as long as the job may go on."""
        reasons = self._reasons_to_stop(state)
        if reasons:
            raise RestartAbort(f"no further restart: {'; '.join(reasons)}")
        return state

    def _reasons_to_stop(self, state: FrozenState) -> list[str]:
        reasons = []
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            reasons.append(f"{state.iteration=} reached max_iterations={self.max_iterations}")
        if state.world_size < self.min_world_size:
            reasons.append(f"{state.world_size=} is below min_world_size={self.min_world_size}")
        # Unset only where this is called without a rank assignment before.
        active_world_size = state.active_world_size
        if active_world_size is not None and active_world_size < self.min_active_world_size:
            reasons.append(
                f"{state.active_world_size=} is below "
                f"min_active_world_size={self.min_active_world_size}"
            )
        return reasons
