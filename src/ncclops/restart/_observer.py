"""What a test harness may see and change of the core: its places, and the settings of a call.

Standard library only. Where no observer is installed, which is everywhere but in a rank that
``ncclops.testing`` has started, a place costs one comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ncclops.restart.settings import Settings

CORE_PLACES = (
    "barrier",  # before the barrier between iterations; the first time before iteration 0
    "initialize",  # before the callback ``initialize``, in each iteration
    "health_check",  # before the health check in an iteration, after ``initialize``
    "abort",  # before the groups are aborted, in the thread that does it
    "finalize",  # before the callback ``finalize``, on the way to a restart
    "restart_health_check",  # before the health check on the way to a restart
)


class Observer(Protocol):
    """What a harness installs in a rank."""

    def passes(self, place: str) -> None:
        """The calling thread passes ``place``. May raise, or never return."""

    def settings(self, settings: Settings) -> Settings:
        """What a call of a wrapped function shall use in place of ``settings``."""


_observer: Observer | None = None


def install(observer: Observer | None) -> None:
    """Have ``observer`` see this process from now on; ``None``: nothing does."""
    global _observer
    _observer = observer


def place(name: str) -> None:
    """A named place in the code, at which a harness can have a fault strike."""
    if _observer is not None:
        _observer.passes(name)


def observed(settings: Settings) -> Settings:
    """The settings of a call, as the observer wants them."""
    return settings if _observer is None else _observer.settings(settings)
