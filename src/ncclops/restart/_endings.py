"""How an iteration ends on a rank, and the exceptions by which the loop itself is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ncclops.restart.attribution import Fault


@dataclass(frozen=True)
class Finished:
    """All active ranks returned from the function; ``value`` is what it returned here."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The iteration is over; ``fault`` and ``error`` are this rank's own part in it, if any."""

    fault: Fault | None = None
    error: BaseException | None = None


class Leaving(BaseException):
    """Unwinds the loop of a rank that has left; ``error`` is what its caller gets."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class ForkedChild(BaseException):
    """Unwinds the loop in a process that the function has forked, and that came out of it.

    Threads, connections and the monitor process are the parent's: the child must not use them. It
    goes on as if the function had not been wrapped, with ``value`` or ``error``.
    """

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self.value = value
        self.error = error
