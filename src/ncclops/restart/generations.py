"""Lost ranks come back: a call goes on with new processes in the places of lost ones.

All keys of a call name ranks by their number at launch, and each process has its own bit, address
and watcher under it. So a rank that comes back does not join the others half-way. The ranks that
are left join anew, together with it, as at the start of the call, in a name space of its own: a
*generation*. Their processes, and all that a process keeps, stay; iterations count on.

========================  =========================================================================
key, in a generation      meaning
========================  =========================================================================
``next``                  the generation after this one, or ``END``; first writer wins
``iteration``             the present iteration, for those that want to come back
``returning`` (log)       initial ranks for which a new process is there
========================  =========================================================================

A new process finds the newest generation, enters itself into ``returning`` and requests a restart
of the present iteration. With the agreement that ends it, all ranks know who is to come back
(``Agreement.returning``), and open the next generation. Where a rank is waited for that has just
been lost, that generation is open when its new process comes. So it is where a rank is lost between
the agreement and its own joining: all expect it still, and its new process joins in its place.

Those that have not joined a generation in time are recorded as gone in it by those that have. A
rank that has joined and is in ``returning`` has ended since: no monitor process may have seen that,
as they learn of each other once all have joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from ncclops.restart._store.client import StoreClient
from ncclops.restart.agreement import Agreement, from_ranges, ranges
from ncclops.restart.attribution import Fault, FaultKind
from ncclops.restart.exception import GpuUnusable, RestartError

END = "end"

# After so long a new process looks whether the iteration that it has asked to end has ended, and
# another one began.
_LOOK_AGAIN = timedelta(seconds=2)

# Processes that have ended without a decision that they should: another one may do better.
_MAY_RETURN = frozenset(
    {FaultKind.DIED, FaultKind.LEFT, FaultKind.FINALIZE, FaultKind.HEALTH_CHECK}
)


class JobEnded(RestartError):
    """The call ended before this rank could come back: there is nothing for it to do."""


@dataclass(frozen=True)
class Generation:
    """What all who join a generation know of it.

    ``first_iteration`` begins it. ``absent`` are initial ranks that nobody expects, ``returning``
    those for which a new process is there, or is waited for. ``incidents_from`` is the number of
    the incident that ends iteration 0, where incidents are written.
    """

    number: int = 0
    first_iteration: int = 0
    absent: frozenset[int] = frozenset()
    returning: frozenset[int] = frozenset()
    incidents_from: int | None = None

    def after(self, agreement: Agreement, incidents_from: int | None) -> Generation:
        """The generation that follows ``agreement``, in which some are ``returning``."""
        return Generation(
            self.number + 1,
            agreement.iteration + 1,
            agreement.gone - agreement.returning,
            agreement.returning,
            incidents_from,
        )

    def to_json(self) -> str:
        """As the store holds it."""
        absent, returning = ranges(self.absent), ranges(self.returning)
        fields = [self.number, self.first_iteration, absent, returning, self.incidents_from]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Generation:
        """The inverse of ``to_json``."""
        number, first, absent, returning, incidents_from = json.loads(text)
        return cls(number, first, from_ranges(absent), from_ranges(returning), incidents_from)


def to_return(
    lost: Iterable[Fault], announced: Iterable[int], *, waits: bool, returned: bool
) -> frozenset[int]:
    """The initial ranks that are to come back with the next generation.

    ``lost`` are the faults of those that left in the iteration that ends, ``announced`` those for
    which a process is there already; ``waits``: others are waited for, too. None of them comes
    back where a rank has ``returned`` from the function: the work may be done. Nor where a rank
    has decided that no restart helps. A rank that left for its GPU is not waited for.
    """
    lost = list(lost)
    if returned or any(fault.stops_restarting for fault in lost):
        return frozenset()
    awaited = (f.initial_rank for f in lost if waits and _may_return(f))
    return frozenset(announced).union(awaited)


def _may_return(fault: Fault) -> bool:
    unusable = fault.raised is not None and fault.raised.is_a(GpuUnusable)
    return fault.kind in _MAY_RETURN and not unusable


class GenerationKeys:
    """The keys of one generation, over a connection that leads to its name space."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store

    def open_next(self, proposal: Generation) -> Generation:
        """The next generation, as the first rank has opened it."""
        self._store.publish("next", proposal.to_json())
        return Generation.from_json(self._store.get("next"))

    def end(self) -> None:
        """No generation follows: the call is over."""
        self._store.publish("next", END)

    def next(self) -> Generation | None:
        """The next generation, if it is open. Raises ``JobEnded``."""
        return self._read(self._store.get("next")) if self._store.check(["next"]) else None

    def wait_for_next(self) -> Generation | None:
        """As ``next``, after a while at the latest."""
        try:
            return self._read(self._store.wait("next", _LOOK_AGAIN))
        except RuntimeError:
            if not self._store.check(["next"]):  # raises where the store has gone
                return None
            raise

    @staticmethod
    def _read(text: str) -> Generation:
        if text == END:
            raise JobEnded("the job has ended before this rank could come back")
        return Generation.from_json(text)

    def note_iteration(self, iteration: int) -> None:
        """``iteration`` has begun."""
        self._store.set("iteration", str(iteration))

    def iteration(self) -> int | None:
        """The present iteration; ``None`` before the first of this generation."""
        return int(self._store.get("iteration")) if self._store.check(["iteration"]) else None

    def announce(self, initial_rank: int) -> None:
        """A new process is there for ``initial_rank``."""
        self._store.append("returning", str(initial_rank))

    def announced(self) -> set[int]:
        """The initial ranks for which one is there: those before it have ended."""
        return set(map(int, self._store.read_log("returning")))
