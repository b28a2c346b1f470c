"""How an iteration ends on a rank, what an exception that ends it means, how the loop is left."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

from ncclops.restart._interrupt.handled import is_handled
from ncclops.restart.attribution import Fault, FaultKind
from ncclops.restart.exception import RankShouldRestart, RestartAbort
from ncclops.restart.raised import chain_of, comes_from_restart, is_due_to_peer, summarise

# What a rank runs into that uses its groups after they were aborted; the last is what NCCL makes of
# a call that waits while its communicator is aborted.
_LACKS_GROUP = re.compile(
    r"process group has not been initialized|invalid process group|"
    r"group .* (is not registered|does not exist)|"
    r"NCCL (error in:.*|[\w ]+ failed:) internal error",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Finished:
    """All active ranks returned from the function; ``value`` is what it returned here."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The iteration is over; ``fault`` and ``error`` are this rank's own part in it, if any."""

    fault: Fault | None = None
    error: BaseException | None = None


class InReserve(BaseException):
    """Leaves a function that was to keep going, on a rank that has none in this iteration."""


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


def follows_from_abort(error: BaseException) -> bool:
    """Whether ``error`` is what happens to a rank whose groups were aborted before."""
    lacks_group = any(_LACKS_GROUP.search(summarise(link)) for link in chain_of(error))
    return lacks_group or is_due_to_peer(error) or comes_from_restart(error)


# By these user code ends its process or stops restarting; other BaseExceptions are means of a
# library, such as GeneratorExit and asyncio's CancelledError.
_MEANT_TO_LEAVE = (SystemExit, KeyboardInterrupt, RestartAbort)


def judge_exit(error: BaseException, interrupted: bool) -> tuple[BaseException, FaultKind | None]:
    """What it means that ``error`` has left the wrapped function.

    ``interrupted``: another fault was seen before, so that ``RankShouldRestart`` was raised in the
    function. Returns the exception to record and the kind of this rank's fault; ``None``: it has
    no fault of its own and restarts.
    """
    asks = _asks_for_restart(error)
    if not asks and not isinstance(error, Exception):
        library = interrupted and not isinstance(error, _MEANT_TO_LEAVE)
        return error, None if library and comes_from_restart(error) else FaultKind.LEFT
    if asks and not interrupted:
        return error, FaultKind.REQUESTED
    own = _own_below_restart(error) if interrupted else None
    if own is None:
        return error, None if asks else FaultKind.EXCEPTION
    return own, FaultKind.EXCEPTION if isinstance(own, Exception) else FaultKind.LEFT


def _own_below_restart(error: BaseException) -> BaseException | None:
    """What the function had raised itself when the interruption came on top of it.

    Clean-up may have raised something on top of that again. ``None``: nothing, or it was dealt
    with.
    """
    links = itertools.dropwhile(lambda each: not _asks_for_restart(each), chain_of(error))
    for later, own in itertools.pairwise(links):
        if isinstance(own, _MEANT_TO_LEAVE):
            return own
        if not _asks_for_restart(own) and not isinstance(own, Exception):
            return None  # a library's means
        if isinstance(own, Exception) and not is_handled(own, later):
            return own
    return None


def _asks_for_restart(error: BaseException) -> bool:
    """Whether it is ``RankShouldRestart``, or a group (of a TaskGroup, say) that has one in it."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_asks_for_restart, error.exceptions))
    return isinstance(error, RankShouldRestart)
