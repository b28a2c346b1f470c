"""Chains of exceptions: ``__cause__`` and ``__context__``, followed as a traceback prints them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ncclops.restart.attribution import Fault, find_cause
from ncclops.restart.exception import RankShouldRestart, RestartError


class RemoteFaultError(RestartError):
    """What happened on the rank that caused the restart, as text.

    Chained to what a rank leaves with that itself was well.
    """


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it was raised from or during, outermost first; ends on a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def comes_from_restart(error: BaseException | None) -> bool:
    """Whether ``error`` is ``RankShouldRestart``, or was raised while that was being handled."""
    return any(isinstance(link, RankShouldRestart) for link in chain_of(error))


def append_to_chain(error: BaseException, earlier: BaseException) -> None:
    """Make ``earlier`` the end of ``error``'s chain, unless it is in it."""
    links = list(chain_of(error))
    if earlier not in links and links[-1].__cause__ is None and links[-1].__context__ is None:
        links[-1].__cause__ = earlier


class Causes:
    """The exceptions that a rank has met, so that none is lost when it ends with another one."""

    def __init__(self, initial_rank: int) -> None:
        self._initial_rank = initial_rank
        self.last: BaseException | None = None
        self._earlier: BaseException | None = None
        self._remote: Fault | None = None  # the latest one

    def note(self, error: BaseException) -> None:
        """The rank has met ``error``."""
        if error is not self.last:
            self._earlier, self.last = self.last, error

    def note_faults(self, faults: Iterable[Fault]) -> None:
        """The faults of an iteration; the cause of them if it is another rank's.

        A rank that merely stops restarting, as a rule all at once, is no reason of its own.
        """
        causes = [fault for fault in faults if not fault.stops_restarting]
        others = [fault for fault in causes if fault.initial_rank != self._initial_rank]
        if others:
            self._remote = find_cause(others)

    def behind(self, error: BaseException) -> BaseException:
        """``error`` with this rank's earlier exception, or else another rank's, behind it."""
        earlier = self._earlier
        if earlier is None and self._remote is not None:
            earlier = RemoteFaultError(self._remote.account)
        if earlier is not None:
            append_to_chain(error, earlier)
        return error
