"""Who watches whom, and who is taken for lost. Pure: counters and times in, ranks out.

Each agent counts up a number of its own in the store. The first agent that is left watches all
others, the others watch the first: two operations a beat on every agent but one, whatever the
size of the job. A counter that stands still is judged by the watcher's own clock, so that clocks
need not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def watched_by(rank: int, living: Iterable[int]) -> list[int]:
    """The ranks that ``rank``, one of the ``living``, has to watch."""
    others = sorted(set(living) - {rank})
    if not others:
        return []
    return others if rank < others[0] else others[:1]


class PulseWatch:
    """Remembers when each counter last moved; ``lost_after_s`` without a move is the end."""

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._seen: dict[int, tuple[int, float]] = {}  # count, and when it was first seen

    def look(self, now: float, counts: Mapping[int, int]) -> list[int]:
        """The ranks among ``counts`` that have stood still for too long at ``now``."""
        for rank, count in counts.items():
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = count, now
        return [rank for rank in counts if now - self._seen[rank][1] >= self._lost_after_s]


class Silence:
    """How long nothing was heard, looked at every ``pause_s`` seconds."""

    def __init__(self, pause_s: float, now: float) -> None:
        self._pause_s = pause_s
        self._looked_at = self._heard_at = now

    def heard(self, now: float) -> None:
        self._heard_at = now

    def look(self, now: float) -> float:
        """Seconds of silence. A watcher that stood still itself (SIGSTOP) has yet to read what came
        meanwhile, so it begins anew."""
        if now - self._looked_at > 2 * self._pause_s:
            self._heard_at = now
        self._looked_at = now
        return now - self._heard_at
