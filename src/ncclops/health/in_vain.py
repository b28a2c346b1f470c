"""Whether ranks wait for peers in vain: all that are left do, and nothing moves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ncclops.health.evidence import IDLE_CPU_SHARE

# What is under way between processes of one machine takes CPU time, and this long none is used.
_STILL_S = 3.0


@dataclass(frozen=True)
class Wait:
    """One look at a rank: the ``number`` of the wait in the kernel that its main thread is in,
    within a call that waits for peers, 0 for none; and the CPU time of its process tree."""

    number: int
    cpu_s: float | None


class InVain:
    """Of ranks of one machine that make up all that is left of a job."""

    def __init__(self) -> None:
        self._waits: Mapping[int, Wait] = {}
        self._since = 0.0

    def look(self, waits: Mapping[int, Wait], now: float) -> bool:
        """Whether the ranks in ``waits`` have all been in one and the same wait for seconds, and
        have used no CPU time. ``now`` is in seconds of any one clock that does not go back."""
        if waits.keys() != self._waits.keys() or not all(
            wait.number == self._waits[rank].number != 0
            and _is_idle(self._waits[rank].cpu_s, wait.cpu_s, now - self._since)
            for rank, wait in waits.items()
        ):
            self._waits, self._since = waits, now
            return False
        return bool(waits) and now - self._since >= _STILL_S


def _is_idle(before_s: float | None, now_s: float | None, elapsed_s: float) -> bool:
    if before_s is None or now_s is None:
        return False
    return now_s - before_s <= IDLE_CPU_SHARE * elapsed_s
