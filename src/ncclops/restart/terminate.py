"""Callback for a rank that leaves with an exception."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ncclops.restart.state import FrozenState


class Terminate(ABC):
    """Called in the main thread of a rank that leaves the job, after the iteration's barrier.

    ``state.fn_exception`` is what the rank is about to raise. An exception that the callback
    raises takes its place, with the original as its context.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """React to the end of this rank; return ``state``, which a ``Compose`` passes on."""
