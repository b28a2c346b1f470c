"""Callback for a job that ended well."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ncclops.restart.state import FrozenState


class Completion(ABC):
    """Called in the main thread of every rank once all ranks have completed.

    Exceptions it raises are logged and otherwise ignored: the work is done.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """React to the completion; return ``state``, which a ``Compose`` passes on."""
