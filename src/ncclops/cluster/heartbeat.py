"""Who watches whom, and who is taken for lost. Pure: counters and times in, ranks out.

Each agent increments a counter in the store. The first agent that is left watches all others, the
others watch the first: two operations per heartbeat on every agent but one, whatever the size of
the job. Each watcher measures by its own clock for how long a counter has not changed, so that
clocks need not agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

# An agent that does not answer loses no node: its workers run on. So it is given longer than a
# host, as many times.
SILENT_AFTER = 4


def watched_by(rank: int, living: Iterable[int]) -> list[int]:
    """The ranks that ``rank``, one of the ``living``, has to watch."""
    others = sorted(set(living) - {rank})
    if not others:
        return []
    return others if rank < others[0] else others[:1]


class HeartbeatWatch:
    """When each counter last changed; a rank whose counter stays the same for ``lost_after_s`` is
    lost."""

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._seen: dict[int, tuple[int, float]] = {}  # count, and when it was first seen

    def look(self, now: float, counts: Mapping[int, int]) -> list[int]:
        """The ranks among ``counts`` whose counter has not changed for too long at ``now``.

        A rank that was lost, or is not among them for a while, is judged anew when it is back.
        """
        self._seen = {rank: seen for rank, seen in self._seen.items() if rank in counts}
        for rank, count in counts.items():
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = count, now
        lost = [rank for rank in counts if now - self._seen[rank][1] >= self._lost_after_s]
        for rank in lost:
            del self._seen[rank]
        return lost


class Silence:
    """For how long no message has come, looked at every ``pause_s`` seconds."""

    def __init__(self, pause_s: float, now: float) -> None:
        self._pause_s = pause_s
        self._looked_at = self._received_at = now
        self._stood_s, self._stood_until = 0.0, now

    def received(self, now: float) -> None:
        """A message has come."""
        self._received_at = now

    def look(self, now: float) -> float:
        """Seconds without a message. A watcher that was itself stopped (SIGSTOP) has yet to read
        what came meanwhile, so it begins to count anew."""
        if self._note_pause(now):
            self._received_at = now
        self._looked_at = now
        return now - self._received_at

    def stood_still(self, now: float) -> float:
        """For how long the watcher was stopped just before ``now``, in seconds; 0 if it was not."""
        self._note_pause(now)
        return self._stood_s if now - self._stood_until <= 2 * self._pause_s else 0.0

    def _note_pause(self, now: float) -> bool:
        since = now - self._looked_at
        if since > 2 * self._pause_s:
            self._stood_s, self._stood_until = since, now
        return since > 2 * self._pause_s


class Unread:
    """Whether a reader has read nothing for ``silent_after_s``, from how much it has not read.

    That is looked at every ``pause_s`` seconds.
    """

    def __init__(self, silent_after_s: float, pause_s: float) -> None:
        self._silent_after_s, self._pause_s = silent_after_s, pause_s
        self._unread = 0
        self._looked_at = self._read_at = -math.inf
        self.is_silent = False

    def look(self, now: float, unread: int) -> bool:
        """Whether ``is_silent`` has changed. ``unread`` grows as more is sent, until it reads."""
        stood_still = now - self._looked_at > 2 * self._pause_s  # we, and it as well, maybe
        if unread == 0 or unread < self._unread or stood_still:
            self._read_at = now
        self._looked_at, self._unread = now, unread
        before, self.is_silent = self.is_silent, now - self._read_at >= self._silent_after_s
        return self.is_silent != before
