"""How much of its time a rank waits for others in collectives: sums over units of work, no torch.

A unit is a step that the script reports, else an update of its optimizer, else a stretch of time
that ends with a collective. The rank that the others wait for is the one that waits least, so the
share of waiting is what ranks are compared by (``ncclops.health.paces``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Literal

UnitKind = Literal["step", "update", "stretch"]

# As many units as are looked at together, and as few as say anything.
WINDOW_UNITS = 50
LEAST_UNITS = 10
# A fused optimizer updates once for each parameter, and stretches have no end of their own.
_SHORTEST_NS: Mapping[UnitKind, int] = {"step": 0, "update": 50_000_000, "stretch": 100_000_000}
# The first two contain compiles and the making of communicators.
_CONTAMINATED_UNITS = 2
# Often at first, so that a short run has something to show; then as a run of weeks needs it.
_OFTEN_S, _SELDOM_S, _OFTEN_RECORDS = 0.5, 5.0, 30
# The standard error of a median is this times the quartiles' distance over the root of the number.
_MEDIAN_ERROR = 0.93

# What is a better unit than what: a step says more of the script than a stretch of time.
_PRECEDENCE: dict[UnitKind, int] = {"stretch": 0, "update": 1, "step": 2}


@dataclass(frozen=True)
class Unit:
    """A unit that is over: its ``number``, when it ended in seconds since the epoch, its length,
    and how much of that was waiting.
    """

    kind: UnitKind
    number: int
    at: float
    seconds: float
    waited_s: float


class Pace:
    """The last units of a rank in this start of the script. Times are nanoseconds of one clock.

    ``put`` takes the fields of a ``pace`` record. All calls come from the thread that trains.
    """

    def __init__(self, put: Callable[[dict[str, Any]], None]) -> None:
        self._put = put
        self.restart()

    def restart(self) -> None:
        """The script starts (again)."""
        self._kind: UnitKind = "stretch"
        self._began_ns: int | None = None
        self._seen = 0
        self._disturbed = False
        self._phases = 0
        self._units: deque[Unit] = deque(maxlen=WINDOW_UNITS)
        self._fresh = 0
        self._records = 0
        self._recorded_at = 0.0

    def phase(self, *, begins: bool) -> None:
        """A declared phase or a warm-up begins or ends: the units around it are not counted."""
        self._phases = max(0, self._phases + (1 if begins else -1))
        self._disturbed = True

    @property
    def by_stretches(self) -> bool:
        """Whether a collective ends a unit: the script has shown neither steps nor updates."""
        return self._kind == "stretch"

    def ends(self, kind: UnitKind, now_ns: int) -> bool:
        """Whether a unit ends now, where a step, an update or a collective does."""
        if _PRECEDENCE[kind] < _PRECEDENCE[self._kind]:
            return False  # the script has better ones
        if _PRECEDENCE[kind] > _PRECEDENCE[self._kind]:
            self._kind, self._seen, self._fresh = kind, 0, 0
            self._units.clear()
        return self._began_ns is None or now_ns - self._began_ns >= _SHORTEST_NS[kind]

    def begin(self, now_ns: int) -> tuple[int, bool]:
        """A unit begins: how long the last one was (0: there was none), and whether it counts."""
        began, self._began_ns = self._began_ns, now_ns
        self._seen += 1
        counts = began is not None and not self._disturbed and self._seen > _CONTAMINATED_UNITS
        self._disturbed = self._phases > 0
        return (0 if began is None else now_ns - began), counts

    def add(self, unit: Unit) -> None:
        """A unit that counts is over, and it is known how long it has waited."""
        if unit.kind != self._kind or unit.seconds <= 0:
            return
        self._units.append(unit)
        self._fresh += 1
        pause = _OFTEN_S if self._records < _OFTEN_RECORDS else _SELDOM_S
        due = not 0 <= unit.at - self._recorded_at < pause
        if self._fresh >= LEAST_UNITS and due:
            self._put(summary(self._units, self._fresh))
            self._fresh, self._recorded_at = 0, unit.at
            self._records += 1


def summary(units: Sequence[Unit] | deque[Unit], fresh: int) -> dict[str, Any]:
    """The fields of a ``pace`` record: medians, which a single odd unit does not move.

    ``fresh`` is how many units have come since the last one.
    """
    shares = [min(1.0, max(0.0, unit.waited_s / unit.seconds)) for unit in units]
    lower, _, upper = quantiles(shares, n=4)
    return {
        "unit": units[-1].kind,
        "number": units[-1].number,
        "first": units[0].number,
        "since": round(units[0].at, 3),
        "units": len(units),
        "fresh": fresh,
        "seconds": round(median(unit.seconds for unit in units), 6),
        "waited": round(median(shares), 5),
        "error": round(_MEDIAN_ERROR * (upper - lower) / len(shares) ** 0.5, 5),
    }
