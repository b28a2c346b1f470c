"""Exceptions of the restart core.

::

    BaseException
    ├── RestartAbort             stop restarting: ends this rank, the others go on without it
    └── RankShouldRestart        raised asynchronously in the main thread to leave the function
    Exception
    ├── PeersAbsent              this rank waited for others that did not come
    └── RestartError             base of what the wrapper itself reports
        ├── HealthCheckError     a health check found this rank unfit to go on
        │   ├── GpuUnusable      its GPU is broken or lost
        │   ├── CudaContextLost  a CUDA error that only a new process gets over
        │   └── (health_check)   FaultCounterExceeded
        ├── StoreGone            the store through which the ranks agree does not answer any more
        ├── NameSpaceUsed        another job has used this place in the store
        ├── InternalError        the wrapper did not do what it guarantees: please report it
        ├── TimeoutError         something the wrapper waited for came too late
        ├── (attribution)        RemoteFaultError: the fault of another rank, as this one's cause
        ├── (generations)        JobEnded: the others had finished when this rank came back
        ├── (_store.client)      AdditionUnknown: the connection broke while a rank was counted
        ├── (snapshot)           SnapshotError
        ├── (rank_assignment)    RankDiscarded: the new assignment has no place for this rank
        └── (store)              BarrierError and its kinds

The names in parentheses live in the module that raises them.
"""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Sequence
from typing import Literal


class RestartError(Exception):
    """Base of the ordinary exceptions that the restart core raises."""


class HealthCheckError(RestartError):
    """A health check failed on this rank; the check's own exception is the ``__cause__``."""


class GpuUnusable(HealthCheckError):
    """This rank's GPU is broken or lost, so that no process can use it. ``device``: which one."""

    def __init__(self, device: str, why: str) -> None:
        super().__init__(f"{device}: {why}")
        self.device = device


class CudaContextLost(HealthCheckError):
    """A CUDA error after which every further call of this process fails; another may do well.

    What CUDA reports is the ``__cause__``, ``device`` is the GPU.
    """

    def __init__(self, device: str, why: str) -> None:
        super().__init__(f"the CUDA context on {device} is lost: {why}")
        self.device = device


class StoreGone(RestartError):
    """The store's server is gone, and with it every means to agree on anything.

    What the store raised is the ``__cause__``.
    """


class NameSpaceUsed(RestartError):
    """Another job has used, or uses, the name space in the store that this one would use."""


class InternalError(RestartError):
    """The wrapper did not do what it guarantees; the message says what. Please report it."""


class TimeoutError(RestartError, builtins.TimeoutError):  # noqa: A001 - the public API's name
    """A deadline passed. Also caught by ``except`` on the builtin ``TimeoutError``."""


@dataclasses.dataclass(frozen=True)
class Escalation:
    """What a rank that stops restarting asks of its launcher.

    ``to``: ``respawn`` (start new processes, a restart in this one cannot help) or ``stop`` (no
    attempt can help). ``reason`` is for people. ``failure`` is what happened and where, for
    comparing it with the failure of the next attempt; ``None`` where no single failure led here.
    ``failed_start``: a communicator did not come up. ``passing``: nothing is known to be wrong with
    the processes but that they could not be freed. ``hung`` is the initial rank that hangs, where
    ``failure`` is a hang.
    """

    to: Literal["respawn", "stop"]
    reason: str
    failure: tuple[str, str] | None = None
    failed_start: bool = False
    passing: bool = False
    hung: int | None = None


class RestartAbort(BaseException):
    """Raise it (for example in ``initialize``) to stop restarting on this rank.

    It is not an ``Exception``, so that it does not count as a fault to be retried: the rank
    leaves the wrapper, and the remaining ranks restart without it. They find ``escalation`` in
    the incident, as ``Fault.escalation`` and ``Incident.escalation``.
    """

    def __init__(self, *args: object, escalation: Escalation | None = None) -> None:
        super().__init__(*args)
        self.escalation = escalation


class PeersAbsent(RuntimeError):
    """This rank waited in vain for others; ``absent_ranks`` are their initial ranks, where known.

    It is for what has ranks wait for each other to raise: the incident names both.
    """

    def __init__(self, message: str, absent_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.absent_ranks = tuple(absent_ranks)


class RankShouldRestart(BaseException):
    """Interrupts the wrapped function on every rank when a fault was seen on any of them.

    The function must let it pass: like all ``BaseException`` it may be caught to clean up, and
    must then be raised again. A user may raise it to ask for a restart.
    """

    def __str__(self) -> str:
        """What it says where clean-up code shows it; the interpreter raises it without a text."""
        return super().__str__() or "all ranks start again: let this exception pass"
