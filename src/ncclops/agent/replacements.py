"""New processes in the places of ranks that were lost, while the others go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ncclops.agent.stop_requests import StopRequests
from ncclops.agent.team import Team
from ncclops.errors import NcclopsError
from ncclops.exhausted import described

# A rank whose processes end one soon after the other has a cause that a new one does not remove,
# and each costs all ranks a restart.
_MOST_IN_A_ROW = 3
_STAYED_S = 600.0


class Replacements:
    """Of one attempt on this node, in the agent's event loop.

    ``refused`` says why a rank is not to be replaced, or None; ``start`` starts its new process;
    ``lost`` is called with a rank where that has failed.
    """

    def __init__(
        self,
        team: Team,
        stop: StopRequests,
        *,
        enabled: bool,
        refused: Callable[[int], str | None],
        start: Callable[[int], Coroutine[Any, Any, None]],
        lost: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        self._team = team
        self._stop = stop
        self._enabled = enabled
        self._refused = refused
        self._start = start
        self._lost = lost
        self._say = say
        self._made: dict[int, list[float]] = {}  # when, by rank; of those that followed each other
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, rank: int) -> bool:
        """The process of ``rank`` has failed: start a new one, where that can help.

        Whether it is being started; where that fails, the terminal says so.
        """
        team = self._team
        is_over = team.ending or team.escalation or team.finished or self._stop.asked
        if not self._enabled or is_over or not team.goes_on():
            return False
        if (why := self._refused(rank) or self._too_often(rank)) is not None:
            self._say(f"rank {rank}: no new process takes its place: {why}")
            return False
        team.returning.add(rank)
        task = asyncio.get_running_loop().create_task(self._replace(rank))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def close(self) -> None:
        """Start no more."""
        self._enabled = False
        for task in self._tasks:
            task.cancel()

    def _too_often(self, rank: int) -> str | None:
        now = time.monotonic()
        made = self._made.setdefault(rank, [])
        if made and now - made[-1] > _STAYED_S:
            made.clear()
        if len(made) >= _MOST_IN_A_ROW:
            return f"{_MOST_IN_A_ROW} have ended within {_STAYED_S / 60:g} minutes of their start"
        made.append(now)
        return None

    async def _replace(self, rank: int) -> None:
        try:
            await self._start(rank)
        except (NcclopsError, OSError, RuntimeError) as error:
            self._say(f"rank {rank}: no new process takes its place: {described(error)}")
            self._team.returning.discard(rank)
            self._lost(rank)
