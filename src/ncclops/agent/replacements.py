"""New processes in the places of ranks that were lost, while the others go on."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from ncclops.agent.stop_requests import StopRequests
from ncclops.agent.team import Team
from ncclops.errors import NcclopsError
from ncclops.exhausted import described

# A rank whose processes end one soon after the other, or at the same step, has a cause that a new
# one does not remove, and each costs all ranks a restart.
_MOST_IN_A_ROW = 3
_STAYED_S = 600.0


class Series:
    """The processes of one rank that were replaced one after the other, and did not help."""

    def __init__(self) -> None:
        self._made_at = 0.0  # the last one
        self._made = 0
        self._furthest: int | None = None

    def refuses(self, now: float, furthest: int | None) -> str | None:
        """Why no further process is to be started; None, and it counts as started now.

        ``now`` in monotonic seconds; ``furthest`` is the highest step of any rank, if known.
        """
        stayed = now - self._made_at > _STAYED_S
        came_further = furthest is None or self._furthest is None or furthest > self._furthest
        if stayed and came_further:
            self._made = 0
        if self._made >= _MOST_IN_A_ROW:
            if stayed:
                return f"{_MOST_IN_A_ROW} have ended, and no rank has done a new step since"
            return f"{_MOST_IN_A_ROW} have ended within {_STAYED_S / 60:g} minutes of their start"
        self._made_at = now
        self._made += 1
        if furthest is not None:
            self._furthest = max(furthest, self._furthest or 0)
        return None


class Replacements:
    """Of one attempt on this node, in the agent's event loop.

    ``enabled`` says whether ranks are to be replaced at all, ``refused`` why one is not, or None;
    ``start`` starts its new process; ``lost`` is called with a rank where that has failed;
    ``furthest`` returns the highest step of any rank, if one is known.
    """

    def __init__(
        self,
        team: Team,
        stop: StopRequests,
        *,
        enabled: Callable[[], bool],
        refused: Callable[[int], str | None],
        start: Callable[[int], Coroutine[Any, Any, None]],
        lost: Callable[[int], None],
        furthest: Callable[[], int | None],
        say: Callable[[str], None],
    ) -> None:
        self._team = team
        self._stop = stop
        self._enabled = enabled
        self._closed = False
        self._refused = refused
        self._start = start
        self._lost = lost
        self._furthest = furthest
        self._say = say
        self._series: dict[int, Series] = defaultdict(Series)  # by rank
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, rank: int) -> bool:
        """The process of ``rank`` has failed: start a new one, where that can help.

        Whether it is being started; where that fails, the terminal says so.
        """
        team = self._team
        is_over = team.ending or team.escalation or team.finished or self._stop.asked
        if self._closed or not self._enabled() or is_over or not team.goes_on():
            return False
        series = self._series[rank]
        why = self._refused(rank) or series.refuses(time.monotonic(), self._furthest())
        if why is not None:
            self._say(f"rank {rank}: no new process takes its place: {why}")
            return False
        team.returning.add(rank)
        task = asyncio.get_running_loop().create_task(self._replace(rank))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def close(self) -> None:
        """Start no more."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _replace(self, rank: int) -> None:
        try:
            await self._start(rank)
        except (NcclopsError, OSError, RuntimeError) as error:
            self._say(f"rank {rank}: no new process takes its place: {described(error)}")
            self._team.returning.discard(rank)
            self._lost(rank)
