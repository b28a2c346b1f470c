"""Lets ranks that are to end by their own SIGTERM handlers out of collectives that never complete.

A handler of Python runs between two instructions of Python. A rank that waits in a collective for
one whose handler has ended is in none until it is killed, and would never save. So once a rank has
ended, or is ready to, and all that are left wait for peers without moving, their groups are
aborted: the calls raise, and the handlers run. As long as any rank that is left may still move,
nothing is done: a handler may use collectives itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

from ncclops.agent.condition import Condition
from ncclops.agent.job import Job
from ncclops.agent.team import Team
from ncclops.agent.workers import Worker
from ncclops.health.in_vain import InVain, Wait
from ncclops.health.probes import tree_cpu_s
from ncclops.rank_lists import ranks_named
from ncclops.record import progress
from ncclops.record.events import StopForcedEvent
from ncclops.record.worker_commands import AbortCommand

# As often as ranks note where they are. Where one does not, its main thread may have gone on, and
# keeps the others from running Python.
_LOOK_EVERY_S, _NOTED_WITHIN_S = 1.0, 2.5
# An abort takes milliseconds where it works at all.
_ABORT_LIMIT = timedelta(seconds=5)


class LeftWaiting:
    """Of ``team``, whose ranks are those of the whole job and have been sent SIGTERM."""

    def __init__(
        self, job: Job, team: Team, condition: Condition, say: Callable[[str], None]
    ) -> None:
        self._job, self._team = job, team
        self._condition, self._say = condition, say

    async def run(self) -> None:
        """Look until the ranks that are left wait in vain; then abort their groups, once."""
        in_vain = InVain()
        while True:
            left = self._left()
            some_have_ended = len(left) < len(self._team.asked_to_stop)
            waits = {worker.rank: self._wait(worker) for worker in left}
            if some_have_ended and in_vain.look(waits, time.monotonic()):
                return await self._abort(left)
            await asyncio.sleep(_LOOK_EVERY_S)  # no event says that nothing moves

    def _left(self) -> list[Worker]:
        """The ranks that have something left to do before they end."""
        running = (w for w in self._team.running() if w.rank not in self._team.ready_to_end)
        return [worker for worker in running if not self._has_left_script(worker.rank)]

    def _has_left_script(self, rank: int) -> bool:
        page = progress.read(self._job.run.paths.rank(rank).progress)
        return page is not None and page.ended

    def _wait(self, worker: Worker) -> Wait:
        page = progress.read(self._job.run.paths.rank(worker.rank).progress)
        cpu_s = tree_cpu_s(worker.pid)
        if page is None or page.pid != worker.pid:
            return Wait(0, cpu_s)
        is_fresh = time.monotonic_ns() - page.tick_ns < _NOTED_WITHIN_S * 1e9
        return Wait(page.wait if is_fresh else 0, cpu_s)

    async def _abort(self, left: list[Worker]) -> None:
        command = AbortCommand(if_waiting=True)
        asked = {worker.rank for worker in left if worker.send_command(command)}
        done = lambda: asked <= self._team.aborted | self._team.ranks_ended  # noqa: E731
        await self._condition.until(done, _ABORT_LIMIT)
        if freed := sorted(asked & self._team.aborted):
            waited = f"{ranks_named(freed)} waited in a collective"
            why = f"{waited}, and the others have ended, or are ready to"
            self._job.run.add(StopForcedEvent(ranks=freed, reason=why))
            self._say(f"{why}: process groups aborted, so that SIGTERM handlers can run")
