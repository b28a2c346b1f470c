"""What is done about ranks that hang: the least that lets the others go on.

A rank whose interpreter does not run gets SIGCONT first, in case that it was stopped. If it does
not run then either, or if it runs but only waits, and workers restart in place: a rank that runs
Python is sent the command to restart, and all restart. A rank that sleeps or waits is interrupted
and takes part; one whose interpreter still does not run is ended after the grace time, so that the
others can go on without it, and at once where none of its node can be sent the command. A rank
that runs Python, and has not left the script long after the command, does not react to it (its
exception has a text that hangs): it is ended as well. Without restarts in place the attempt has
failed, and the policy decides.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from ncclops.agent.hosted_store import StoreAddress
from ncclops.agent.job import Job
from ncclops.agent.team import Team
from ncclops.agent.workers import Worker
from ncclops.health.hang import HangFinding, HangVerdict
from ncclops.host_name import with_port
from ncclops.rank_lists import ranks_named
from ncclops.record import progress
from ncclops.record.event_values import HangEvidence
from ncclops.record.events import HangEndedEvent, HangEvent
from ncclops.record.progress import Progress
from ncclops.record.worker_commands import RestartCommand

# A rank that was stopped shows that it runs again with its next heartbeat, of which there is one a
# second.
_WAKE_S = 3.0


@dataclass(frozen=True)
class Hang:
    """An attempt that failed because ``ranks`` hang."""

    ranks: tuple[int, ...]
    reason: str


def before_any_group(verdict: HangVerdict, store: StoreAddress) -> HangVerdict:
    """``verdict`` about ranks none of which has had a process group: where they are to meet.

    A rank that waits for a store that does not answer shows its address nowhere.
    """
    where = with_port(store.host, store.port)
    meet = f"no rank has a process group yet: they meet in the store at {where}"
    return replace(verdict, reason=f"{verdict.reason}; {meet}")


class HangAction:
    """Acts on verdicts about ``team``. ``give_up`` is called where the attempt cannot go on."""

    def __init__(
        self, job: Job, team: Team, say: Callable[[str], None], give_up: Callable[[Hang], None]
    ) -> None:
        self._job, self._team, self._say, self._give_up = job, team, say, give_up
        self._loop = asyncio.get_running_loop()
        self._not_before = 0.0  # a restart takes a moment to show
        self._closed = False
        self.last: Hang | None = None  # that was found in this attempt
        self._said: HangVerdict | None = None
        # Ranks that were to leave the script: in which iteration, and until when.
        self._leaving = dict[int, tuple[int, float]]()

    def on_hung(self, verdict: HangVerdict) -> None:
        """The hang of ``verdict`` was found; called repeatedly while it lasts."""
        if self._closed or self._loop.time() < self._not_before:
            return
        self._not_before = self._loop.time() + self._job.hang.hang.total_seconds() + _WAKE_S
        if staying := self._staying(verdict):
            self._record(verdict, "end it")
            for worker in staying:
                self._end_now(worker)
            return
        frozen = {finding.rank for finding in verdict.findings if finding.frozen}
        culprits = [w for w in self._team.running() if w.rank in frozen & set(verdict.culprits)]
        if not culprits:
            self._act(verdict, frozen)
            return
        self._record(verdict, "wake it")
        ticks = {worker.rank: self._tick(worker) for worker in culprits}
        for worker in culprits:
            worker.send(signal.SIGCONT)
        self._loop.call_later(_WAKE_S, self._after_waking, verdict, frozen, culprits, ticks)

    def _after_waking(
        self,
        verdict: HangVerdict,
        frozen: set[int],
        culprits: list[Worker],
        ticks: dict[int, int | None],
    ) -> None:
        # The end of the others is dealt with elsewhere.
        running = [w for w in culprits if w.exit is None]
        still = [w for w in running if self._tick(w) == ticks[w.rank]]
        if woken := [w.rank for w in running if w not in still]:
            runs = "runs" if len(woken) == 1 else "run"
            self._say(f"{ranks_named(woken)} {runs} again since SIGCONT: nothing is restarted")
        if not still or self._closed:
            return
        if self._others_go_on and self._restarting_worker(frozen) is None:
            self._record(verdict, "end it")
            for worker in still:
                self._end(worker, ticks[worker.rank])
        elif self._act(verdict, frozen):
            grace_s = self._job.stop_grace.total_seconds()
            for worker in still:
                self._loop.call_later(grace_s, self._end, worker, ticks[worker.rank])

    def _act(self, verdict: HangVerdict, frozen: set[int]) -> bool:
        """Have all ranks restart in place; False where that is not possible."""
        worker = self._restarting_worker(frozen)
        self._record(verdict, "restart in place" if worker else "end the attempt")
        if worker is None:
            self._give_up(Hang(verdict.culprits, verdict.reason))
            return False
        worker.send_command(
            RestartCommand(reason=f"hang: {verdict.reason}", hung=verdict.culprits[0])
        )
        until = self._loop.time() + (self._job.timeouts.abort or timedelta()).total_seconds()
        for rank in verdict.culprits:
            page = self._page(rank)
            if page is not None and self._leaving.get(rank, (None,))[0] != page.iteration:
                self._leaving[rank] = page.iteration, until
        return True

    def _staying(self, verdict: HangVerdict) -> list[Worker]:
        """The culprits that were to leave the script, and have not in the time of an abort."""
        culprits = (w for w in self._team.running() if w.rank in verdict.culprits)
        return [worker for worker in culprits if self._stays(worker.rank)]

    def _stays(self, rank: int) -> bool:
        iteration, until = self._leaving.get(rank, (None, math.inf))
        if self._loop.time() < until:
            return False
        page = self._page(rank)
        # One that has left waits for the others, and has the limits of the restart core.
        return page is not None and page.iteration == iteration and not page.left

    def tell(self, verdict: HangVerdict) -> None:
        """Record the hang of ``verdict``, for which a run that is stopping is ended at once."""
        self._record(verdict, "end the run")

    def close(self) -> None:
        """The attempt is over: actions that are still scheduled do nothing."""
        self._closed = True

    @property
    def _others_go_on(self) -> bool:
        """Whether ranks of other nodes restart in place when one of this node ends."""
        layout = self._job.layout
        return self._job.restarts_in_process and layout.world_size > layout.nproc

    def _restarting_worker(self, frozen: set[int]) -> Worker | None:
        """A worker that can make all others restart."""
        if not self._job.restarts_in_process:
            return None
        able = (w for w in self._team.running() if w.rank in self._team.entered - frozen)
        return next(able, None)

    def _record(self, verdict: HangVerdict, action: str) -> None:
        self.last = Hang(verdict.culprits, verdict.reason)
        self._job.run.add(
            HangEvent(
                rank=verdict.culprits[0],
                culprits=list(verdict.culprits),
                cause=verdict.reason,
                evidence=[_evidence(finding) for finding in verdict.findings],
                action=action,
            )
        )
        if verdict is not self._said:  # waking it is the first of two actions
            self._said = verdict
            self._say(f"hang: {verdict.reason}")

    def _end(self, worker: Worker, tick: int | None) -> None:
        if not self._closed and worker.exit is None and self._tick(worker) == tick:
            self._end_now(worker)

    def _end_now(self, worker: Worker) -> None:
        self._job.run.add(HangEndedEvent(rank=worker.rank))
        self._team.ended_for_hang.add(worker.rank)
        worker.send(signal.SIGKILL)

    def _tick(self, worker: Worker) -> int | None:
        page = self._page(worker.rank)
        return None if page is None else page.tick_ns

    def _page(self, rank: int) -> Progress | None:
        return progress.read(self._job.run.paths.rank(rank).progress)


def _evidence(finding: HangFinding) -> HangEvidence:
    return HangEvidence(
        rank=finding.rank,
        state=finding.state,
        stale=[str(kind) for kind in finding.stale],
        window_s=None if finding.window is None else finding.window.total_seconds(),
        reason=finding.reason,
    )
