"""One attempt: the store and all workers of this node, from their start to the last one's end."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from ncclops.agent import hosted_store, log_files, worker_messages, workers
from ncclops.agent.condition import Condition
from ncclops.agent.coordinator import Coordinator
from ncclops.agent.diagnostics import InternalErrors
from ncclops.agent.hang_action import Hang, HangAction
from ncclops.agent.hang_watch import HangWatch
from ncclops.agent.job import Job
from ncclops.agent.live_scan import LiveDiagnosis, LiveScan
from ncclops.agent.rendezvous_result import Place
from ncclops.agent.stop_requests import StopRequests
from ncclops.agent.team import Team
from ncclops.agent.team_stop import TeamStop
from ncclops.agent.watching import Watching
from ncclops.diagnose.agent_incident import ProcessEnd, record_end
from ncclops.env import snapshot
from ncclops.errors import NcclopsError
from ncclops.host import process_tree
from ncclops.receipts.log_receipts import PrintedReceipts
from ncclops.record.environment_record import ENVIRONMENT
from ncclops.record.events import (
    STORE_LOST,
    Event,
    FaultEvent,
    RestartEvent,
    WorkerExitedEvent,
    WorkerStartedEvent,
)
from ncclops.record.stop_point import StopPage
from ncclops.record.variables import AGENT_PID, STARTED

# For a worker's own children once it has ended: time to flush a log or finish an upload.
_LEFTOVER_GRACE = timedelta(seconds=5)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttemptContext:
    """What all attempts of a run share.

    ``say`` shows a line on the terminal; ``note`` one about what goes as it should, which ``-q``
    leaves out.
    """

    job: Job
    errors: InternalErrors
    condition: Condition
    stop: StopRequests
    say: Callable[[str], None]
    note: Callable[[str], None]
    lose: Callable[[int, Sequence[int]], None]  # a rank, and those that go on without it
    collect: Callable[[], None]  # deliver what workers have reported so far
    collect_receipts: Callable[[], None]  # and what they have recorded
    printed: PrintedReceipts
    spared: Callable[[], AbstractSet[int]]  # processes that outlive an attempt
    coordinator: Coordinator  # the agents of the other nodes, if any


class RunningAttempt:
    """An attempt at ``place``. ``environ`` is what a retry adds to the plan.

    ``cannot_start`` says why the attempt came to nothing, where it did.
    """

    def __init__(self, context: AttemptContext, place: Place, environ: Mapping[str, str]) -> None:
        self.number = place.number
        self.team = Team(context.job.restarts_in_process)
        self.cannot_start: NcclopsError | None = None
        self._place = place
        self._context = context
        self._job, self._run = context.job, context.job.run
        self._environ = environ
        self._server: hosted_store.StoreServer | None = None
        self._stop_page: StopPage | None = None
        self._scan = LiveScan(log_files.output(self._run, place.ranks), context.printed)
        self.watching = Watching(self._job, place.ranks, context.say)
        self.hang: Hang | None = None  # where the attempt came to nothing because of one
        self._hang_action = HangAction(self._job, self.team, context.say, self._on_hang)
        self._hang_watch = HangWatch(
            self._job,
            place.ranks,
            self.team,
            self.watching.steps_printed,
            self._hang_action.on_hung,
        )

    # --- phases -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the store and the workers."""
        self._scan.start()
        if self.cannot_start is not None:
            log.warning("attempt %d cannot start: %s", self.number, self.cannot_start)
            return
        log.info(
            "attempt %d: ranks %s, store %s", self.number, self._place.ranks, self._place.store
        )
        try:
            self._server = self._start_store()
            with suppress(OSError):  # without it, workers are stopped by signals alone
                self._stop_page = StopPage.create(self._run.path)
            self._spawn_all()
            if not self._place.spare:  # to wait is what these are there for
                self._hang_watch.start()
        except (NcclopsError, OSError) as error:
            self.cannot_start = NcclopsError(f"cannot start attempt {self.number + 1}: {error}")

    async def watch(self) -> None:
        """Return when all workers have ended, a failure ends the attempt, or a stop was requested.

        A node in reserve has none, and watches the others.
        """
        team, stop, coordinator = self.team, self._context.stop, self._context.coordinator
        await self._context.condition.until(
            lambda: (
                not (team.running() or self._place.idle)
                or team.final_failure() is not None
                or stop.asked
                or self.hang
                or self.cannot_start
                or coordinator.over_for_all()
            )
        )
        self._hang_watch.close()
        self._hang_action.close()

    def failure(self) -> tuple[int, str] | None:
        """Which rank's failure has ended the attempt and how it failed, if one has."""
        if self.hang is not None:
            return self.hang.ranks[0], f"hung: {self.hang.reason}"
        failed = self.team.final_failure()
        return None if failed is None else (failed.rank, str(failed.exit))

    def is_fatal(self) -> bool:
        """Whether the failure ends the attempt on all nodes, restarts in place or not."""
        team = self.team
        if self.hang is not None or team.escalation is not None:
            return True
        failed = [worker for worker in team.ended if worker.exit and not worker.exit.ok]
        return any(team.ends_all(w) for w in failed if w.rank not in team.asked_to_stop)

    async def stop_workers(self) -> None:
        """End the workers that still run: at one point if a stop was requested, else by signals."""
        team, context = self.team, self._context
        if team.escalation is not None and not context.stop.asked:
            # All of them are leaving by themselves and report why; most need no signal.
            done = lambda: not team.running() or context.stop.asked  # noqa: E731
            await context.condition.until(done, self._job.stop_grace)
        if not team.running():
            return
        others = context.coordinator.stop_agreement()
        stop = TeamStop(
            self._job,
            team,
            context.stop,
            context.condition,
            self._stop_page,
            context.say,
            context.note,
            others,
            spare=self._place.spare,
        )
        asked = context.stop.asked or (others is not None and others.asked)
        if self.hang is not None:
            await self._collect_snapshots()
            await stop.force(f"rank {self.hang.ranks[0]} hangs")
        elif asked and team.final_failure() is None:
            await stop.run()
        else:
            await self._collect_snapshots()
            await stop.signal_all(self._job.stop_grace)

    async def _collect_snapshots(self) -> None:
        """Of the ranks that are about to be ended because one has failed, or hangs."""
        failure = self.team.final_failure()
        if self.hang is None and (failure is None or self._job.restarts_in_process):
            return  # the restart core takes the snapshots
        failed = [] if failure is None else [failure]
        failed += [worker for worker in self.team.ended if worker is not failure]
        hung = {} if self.hang is None else dict.fromkeys(self.hang.ranks, self.hang.reason)
        with self._context.errors.recorded("taking snapshots"), suppress(OSError):
            # A full disk must not keep workers from being ended.
            await asyncio.to_thread(
                record_end,
                self._run.path,
                ended={
                    worker.rank: ProcessEnd(worker.exit.code, worker.exit.signal)
                    for worker in failed
                    if worker.exit is not None
                },
                running=[worker.rank for worker in self.team.running()],
                attempt=self.number,
                hung=hung,
            )

    async def close(self) -> LiveDiagnosis:
        """End what is left of the attempt; what its output shows."""
        self.watching.close()
        self._close_store()
        if survivors := process_tree.end_descendants(
            _LEFTOVER_GRACE, self.own_pids(), spared=self._context.spared()
        ):
            self._context.say(f"processes that SIGKILL did not end: {survivors}")
        diagnosis = await asyncio.to_thread(
            self._scan.finish,
            self.team.failed_exits(),
            self.hang,
            starting_up=not self.team.bootstrapped,
        )
        self._context.collect_receipts()
        self.watching.flush()
        return diagnosis

    # --- what happens meanwhile ---------------------------------------------------------------

    def take_over(self, rank: int, event: Event) -> None:
        """A worker has reported something."""
        if isinstance(event, FaultEvent | RestartEvent):
            self._context.collect_receipts()
            self.watching.flush()
        worker_messages.take_over(self._run, self.team, rank, event)
        self._context.condition.notify()

    def _on_hang(self, hang: Hang) -> None:
        log.info("hang of ranks %s ends the attempt: %s", hang.ranks, hang.reason)
        self.hang = hang
        self.team.hung = set(hang.ranks)
        self.team.last_faulty = hang.ranks[0]
        self._context.condition.notify()

    def own_pids(self) -> set[int]:
        """Children of the agent that are waited for elsewhere."""
        own = {worker.pid for worker in self.team.running()}
        return own if self._server is None else own | {self._server.process.pid}

    def _on_worker_end(self, worker: workers.Worker) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        ended = worker.reap()
        self.team.ended.append(worker)
        log.info("rank %d (pid %d) %s", worker.rank, worker.pid, ended.describe())
        self._context.collect()  # what it reported last, before its end is judged
        self._context.collect_receipts()
        self.watching.flush()
        self.team.release()
        self._run.add(
            WorkerExitedEvent(rank=worker.rank, exit_code=ended.code, signal=ended.signal)
        )
        if not ended.ok and worker.rank not in self.team.asked_to_stop:
            if not self.team.ends_all(worker):
                self._context.lose(worker.rank, [other.rank for other in self.team.running()])
            self._context.coordinator.share_failure(worker, fatal=self.team.ends_all(worker))
        self._context.condition.notify()

    def _on_store_end(self) -> None:
        assert self._server is not None
        asyncio.get_running_loop().remove_reader(self._server.pidfd)
        # Existing groups work without it, so this is only reported; workers that still need the
        # store fail by themselves, and this line explains why.
        self._run.add(
            FaultEvent(cause=STORE_LOST, kind=STORE_LOST, log=str(self._run.paths.store_log))
        )
        self._context.say(f"the store server ended: {self._run.shown(self._run.paths.store_log)}")

    # --- what the phases are made of ------------------------------------------------------------

    def _start_store(self) -> hosted_store.StoreServer | None:
        place = self._place
        if place.listener is None:
            return None
        server = hosted_store.serve(place.listener, place.store.host, self._run.paths.store_log)
        asyncio.get_running_loop().add_reader(server.pidfd, self._on_store_end)
        return server

    def _close_store(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.pidfd)
            self._server.close()
            self._server = None

    def _spawn_all(self) -> None:
        attempt = workers.WorkerAttempt(
            number=self.number,
            most=self._job.retry.granted,
            job_id=self._job.job_id,
            store=self._place.store,
        )
        started = f"{time.time():.3f}"
        for local_rank, rank in enumerate(self._place.ranks):
            self._spawn(attempt, local_rank, rank, started)

    def _spawn(
        self, attempt: workers.WorkerAttempt, local_rank: int, rank: int, started: str
    ) -> None:
        full = {
            **self._job.environ_of(rank),
            **self._place.environ,
            **self._environ,
            **workers.identity(self._place.layout, attempt, local_rank),
            "TORCHELASTIC_ERROR_FILE": str(self._run.paths.rank(rank).error(self.number)),
            AGENT_PID: str(os.getpid()),
            STARTED: started,
        }
        with suppress(OSError):  # for `env diff` of two ranks; no reason not to start
            path = self._run.paths.rank(rank).environment
            ENVIRONMENT.write(path, snapshot.take(full, label=path.stem))
        worker = workers.Worker.spawn(rank, self._job.argv, full, self._run)
        self.team.workers.append(worker)
        asyncio.get_running_loop().add_reader(worker.pidfd, partial(self._on_worker_end, worker))
        self._run.add(WorkerStartedEvent(rank=rank, pid=worker.pid, attempt=self.number))
