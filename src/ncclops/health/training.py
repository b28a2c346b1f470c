"""Whether a rank that shows no steps of its own trains all the same: by its collectives.

Without steps, updates or printed lines a rank would count as compiling for good. Its collectives
tell more: where another rank has completed steps, and this one's collectives have moved since, it
takes part in them; and where they have gone on moving, without a pause, for as long as an idle rank
may idle, it trains. A compile between collectives that are not part of a step (layers compiled one
by one, a thread that exchanges heartbeats) may be taken for training then. It is not taken for a
hang: as long as collectives move, or the process tree computes, a rank works; only one that does
neither has the shorter window.
"""

from __future__ import annotations

from datetime import timedelta

from ncclops.health.evidence import WARMUP_PHASE, Reading
from ncclops.health.hang import HangLimits
from ncclops.record.progress import WARM_AFTER_STEPS

# Collectives that move again after more than this part of the window begin anew. Workers count
# theirs once a second.
_PAUSE = 0.2
_LEAST_PAUSE = timedelta(seconds=3)
# The looks in which collectives have moved since another rank has completed steps.
_LOOKS_WITH_OTHERS = 2


def shows_steps(reading: Reading) -> bool:
    """Whether the rank of ``reading`` shows steps, and has warmed up by them."""
    return not reading.warming_up and (reading.steps or 0) >= WARM_AFTER_STEPS


class Training:
    """Follows the collectives of one rank."""

    def __init__(self, limits: HangLimits) -> None:
        self._pause_s = max(limits.hang * _PAUSE, _LEAST_PAUSE).total_seconds()
        self._needed_s = limits.quiet.total_seconds()
        self._incarnation: object = None
        self._counted: int | None = None
        self._since = self._moved = 0.0
        self._looks_with_others = 0
        self._trains = False

    def saw(self, reading: Reading, now: float, *, others_show_steps: bool) -> bool:
        """Whether the rank trains, after one more look at ``now`` (as for ``evidence.Tracker``)."""
        if reading.incarnation != self._incarnation:
            self._incarnation, self._counted, self._trains = reading.incarnation, None, False
        if not others_show_steps:
            self._looks_with_others = 0
        counted = _counted(reading)
        if counted is None or reading.phase == WARMUP_PHASE:
            return False
        if self._counted is None:
            self._since = self._moved = now
            self._looks_with_others = 0
        elif counted != self._counted:
            if now - self._moved > self._pause_s:
                self._since = now
            self._moved = now
            self._looks_with_others += others_show_steps
            self._trains |= (
                now - self._since >= self._needed_s or self._looks_with_others >= _LOOKS_WITH_OTHERS
            )
        self._counted = counted
        return self._trains


def _counted(reading: Reading) -> int | None:
    """Collectives of the rank, of which only changes matter."""
    if reading.enqueued is None:
        return None
    return reading.enqueued + (reading.completed or 0)
