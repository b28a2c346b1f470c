"""Ranks that others wait for, unit of work after unit: pure functions over shares of waiting.

In a job whose ranks meet in collectives the time of a step is the same on all of them, and the slow
rank is the one that waits least. So compared is the share of its time that each rank waits: no
clocks of two machines are, and nothing is asked of the script (``ncclops.receipts.pace`` measures).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Literal

from ncclops.health.stragglers import ADVICE, THRESHOLD, Straggler
from ncclops.record.receipt_records import PaceRecord

# A loader that is slow for a while is not a slow rank.
LASTS_S = 60.0
# So many units have to show it, and in a run that ends before that time, most of them.
LEAST_UNITS = 20
_MOST_OF_RUN = 0.5
# The lead of the others over its error, so that noise makes no straggler of whoever came last.
_ERRORS = 4.0
# Once slow, a rank is slow until it is this share of the threshold behind.
_STAYS = 0.5
# Other nodes are told of a change of the share by more than a fifth of the threshold.
_TOLD = 0.01


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """The share of its last units that ``rank`` has ``waited``, with its standard ``error``.

    ``peers`` are ranks that do the same work; None: all. ``unit`` is step, update or stretch,
    ``first`` the number of the first unit, which ended at ``since``; ``fresh`` have come since the
    last time. ``at`` is in seconds since the epoch.
    """

    rank: int
    iteration: int
    waited: float
    error: float
    unit: str = "step"
    first: int = 0
    since: float = 0.0
    at: float = 0.0
    fresh: int = 0
    peers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, rank: int, record: PaceRecord) -> RankPace:
        """What a record of ``rank`` says."""
        return cls(
            rank=rank,
            iteration=record.iteration,
            waited=record.waited,
            error=record.error,
            unit=record.unit,
            first=record.first,
            since=record.since,
            at=record.ts,
            fresh=record.fresh,
            peers=None if record.peers is None else tuple(record.peers),
        )

    def differs(self, earlier: RankPace | None) -> bool:
        """Whether other nodes have to know this, who know of ``earlier``."""
        return (
            earlier is None
            or (earlier.iteration, earlier.peers) != (self.iteration, self.peers)
            or abs(earlier.waited - self.waited) > _TOLD
        )


def compare(rank: int, paces: Mapping[int, RankPace]) -> tuple[float, bool]:
    """How many times as slow as the median rank ``rank`` is, and whether that is more than noise.

    Compared with are the ranks of ``paces`` that do the same work. What the rank that waits least
    spends in collectives is the transfer, which all have. Of an even number of ranks the lower
    median counts.
    """
    mine = paces[rank]
    others = [paces[each] for each in _alike(mine, paces)]
    if len(others) < 2:
        return 1.0, False
    least = min(pace.waited for pace in others)
    own = {pace.rank: 1.0 - (pace.waited - least) for pace in others}
    usual = median_low(own.values())
    noise = mine.error + median(pace.error for pace in others)
    ratio = own[rank] / usual if usual > 0 else 1.0
    return ratio, own[rank] - usual > _ERRORS * noise


def _alike(mine: RankPace, paces: Mapping[int, RankPace]) -> Iterable[int]:
    if mine.peers is not None:
        return [rank for rank in mine.peers if rank in paces]
    return [rank for rank, pace in paces.items() if pace.peers is None]


@dataclass
class _History:
    """Of one rank. ``slow`` units of the last ``seen`` make an episode since ``slow_from``."""

    seen: int = 0
    slow: int = 0
    slow_from: float = 0.0
    first: int = 0
    since: float = 0.0
    ratio: float = 1.0
    last: float = 0.0
    said: bool = False


@dataclass
class PaceWatch:
    """Takes what ranks show, those of other nodes as well, and says each finding once."""

    threshold: float = THRESHOLD
    _paces: dict[int, RankPace] = field(default_factory=dict)
    _histories: dict[int, _History] = field(default_factory=dict)
    _iteration: int = 0

    def saw(self, pace: RankPace, elsewhere: Sequence[RankPace] = ()) -> list[Straggler]:
        """``pace`` of a rank of this node is new; ``elsewhere`` are those of other nodes' ranks."""
        if pace.iteration < self._iteration:
            return []
        if pace.iteration > self._iteration:
            self._iteration = pace.iteration
            self._paces.clear()
            self._histories.clear()
        self._paces[pace.rank] = pace
        history = self._histories.setdefault(pace.rank, _History())
        return self._judge(pace, history, self._known(elsewhere))

    def suspected(self, rank: int) -> bool:
        """Whether ``rank`` is slow at the moment, for long or not."""
        history = self._histories.get(rank)
        return history is not None and history.slow > 0

    def finish(self) -> list[Straggler]:
        """The ranks end: those that were slow for most of a run that was not long."""
        found = [
            (rank, history)
            for rank, history in self._histories.items()
            if not history.said and history.slow >= max(LEAST_UNITS, _MOST_OF_RUN * history.seen)
        ]
        return [self._found(rank, history, "chronic") for rank, history in found]

    def _known(self, elsewhere: Sequence[RankPace]) -> dict[int, RankPace]:
        others = {pace.rank: pace for pace in elsewhere if pace.iteration == self._iteration}
        return others | self._paces

    def _judge(
        self, pace: RankPace, history: _History, known: Mapping[int, RankPace]
    ) -> list[Straggler]:
        ratio, certain = compare(pace.rank, known)
        bound = self.threshold * (_STAYS if history.slow else 1.0)
        history.seen += pace.fresh
        if ratio <= 1 + bound or not certain:
            self._histories[pace.rank] = _History(seen=history.seen)
            return [self._found(pace.rank, history, "over")] if history.said else []
        if not history.slow:
            is_first = history.seen == pace.fresh
            history.slow_from, history.first = pace.at, pace.first
            # A median has changed when half of what it is made of has.
            history.since = pace.since if is_first else (pace.since + pace.at) / 2
        history.slow += pace.fresh
        history.ratio, history.last = ratio, pace.at
        lasts = history.last - history.slow_from >= LASTS_S
        if history.said or history.slow < LEAST_UNITS or not lasts:
            return []
        history.said = True
        return [self._found(pace.rank, history, "chronic")]

    def _found(self, rank: int, history: _History, kind: Literal["chronic", "over"]) -> Straggler:
        return Straggler(
            rank=rank,
            ratio=round(history.ratio, 3),
            kind=kind,
            since_step=history.first,
            since=history.since,
            steps_slow=history.slow,
            steps_compared=history.seen,
            advice=ADVICE if kind == "chronic" else "",
            measured="waiting",
            over_s=round(max(0.0, history.last - history.since), 3),
        )
