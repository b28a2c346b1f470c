"""What became of a job: values for a test to assert on."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ncclops.restart.incident import Incident
from ncclops.testing.errors import RankFailed
from ncclops.testing.faults import Fault

_LOG_TAIL = 4000


@dataclass(frozen=True)
class Note:
    """What a rank sent with ``note``. ``at`` is in seconds since the epoch."""

    rank: int
    name: str
    fields: Mapping[str, Any]
    at: float


@dataclass(frozen=True)
class Strike:
    """A fault that struck. ``at`` is in seconds since the epoch."""

    fault: Fault
    at: float


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    ``exit_code`` is that of its process: 0 after it has returned, 1 after an exception, negative
    for a signal. ``error`` is the exception that it left with as one line, ``chain`` that and what
    it is chained to, ``traceback`` the whole text. ``incidents`` are those that this rank saw, in
    order. ``log`` is the file with its output.
    """

    rank: int
    exit_code: int
    log: Path
    pickled: bytes | None = field(default=None, repr=False)
    error: str | None = None
    chain: tuple[str, ...] = ()
    traceback: str | None = field(default=None, repr=False)
    incidents: tuple[Incident, ...] = field(default=(), repr=False)

    @property
    def returned(self) -> bool:
        """Whether the function returned and the process ended well."""
        return self.pickled is not None and self.exit_code == 0

    @property
    def value(self) -> Any:
        """What the function returned. Raises ``RankFailed`` if it did not."""
        if self.pickled is None:
            raise RankFailed(
                f"rank {self.rank} returned nothing: {self.ending}; its log: {self.log}"
            )
        return pickle.loads(self.pickled)

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        if self.returned:
            return "returned"
        signalled = (
            f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        )
        return self.error or signalled

    def log_tail(self) -> str:
        """The end of its output."""
        if not self.log.exists():
            return ""
        return self.log.read_text(errors="replace")[-_LOG_TAIL:]


@dataclass(frozen=True)
class JobResult:
    """What became of a job whose ranks have all ended."""

    ranks: Mapping[int, RankResult]
    strikes: tuple[Strike, ...]
    notes: tuple[Note, ...] = field(repr=False)

    @property
    def values(self) -> dict[int, Any]:
        """What each rank returned that did."""
        return {rank: result.value for rank, result in self.ranks.items() if result.returned}

    @property
    def value(self) -> Any:
        """What all ranks that returned have returned alike. Raises ``RankFailed``: not alike."""
        values = self.values
        if not values:
            endings = ", ".join(f"rank {r}: {result.ending}" for r, result in self.ranks.items())
            raise RankFailed(f"no rank has returned ({endings}); see {self._logs}")
        first = next(iter(values.values()))
        if any(value != first for value in values.values()):
            raise RankFailed(f"the ranks returned different values: {values}")
        return first

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """One for each restart, as the lowest rank that returned saw it.

        All ranks agree on what they are about, and differ in ``phases_ms`` and in their own
        numbers. Where no rank returned: as the rank saw it that had the most.
        """
        results = self.ranks.values()
        for result in results:
            if result.returned:
                return result.incidents
        return max((result.incidents for result in results), key=len, default=())

    @property
    def restarts(self) -> int:
        """How often the function was entered again."""
        return len(self.incidents)

    @property
    def lost(self) -> frozenset[int]:
        """The initial ranks that did not return."""
        return frozenset(rank for rank, result in self.ranks.items() if not result.returned)

    @property
    def taken(self) -> frozenset[int]:
        """The initial ranks that a fault took out of the job; no other should be in ``lost``."""
        return frozenset[int]().union(*(strike.fault.takes for strike in self.strikes))

    def notes_of(self, name: str, rank: int | None = None) -> list[Note]:
        """The notes called ``name``, of one rank or of all, in order of time."""
        return [n for n in self.notes if n.name == name and rank in (None, n.rank)]

    @property
    def _logs(self) -> str:
        return ", ".join(str(result.log) for result in self.ranks.values())
