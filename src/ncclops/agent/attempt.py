"""One attempt: the store and all workers of this node, from their start to the last one's end."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from ncclops.agent import (
    hosted_store,
    last_output,
    log_files,
    old_snapshots,
    worker_messages,
    workers,
)
from ncclops.agent.attached import Streams
from ncclops.agent.condition import Condition
from ncclops.agent.coordinator import Coordinator
from ncclops.agent.diagnostics import InternalErrors
from ncclops.agent.ended_by_monitor import why_ended
from ncclops.agent.fork_server import ForkServer, ForkServers
from ncclops.agent.gpu_watch import GpuWatch
from ncclops.agent.hang_action import Hang, HangAction, before_any_group
from ncclops.agent.hang_watch import HangWatch
from ncclops.agent.in_thread import in_thread
from ncclops.agent.job import Job
from ncclops.agent.live_scan import LiveDiagnosis, LiveScan
from ncclops.agent.network_watch import NetworkLines, NetworkWatch
from ncclops.agent.rendezvous_result import Place
from ncclops.agent.replacements import Replacements
from ncclops.agent.stop_requests import StopRequests
from ncclops.agent.team import Team
from ncclops.agent.team_stop import TeamStop
from ncclops.agent.watching import Watching
from ncclops.agent.worker_starts import WorkerStarts
from ncclops.diagnose.agent_incident import LIMIT, ProcessEnd, record_end
from ncclops.errors import NcclopsError
from ncclops.exhausted import advice, described
from ncclops.health.hang import HangVerdict
from ncclops.host import process_tree
from ncclops.host.nvml import GpuName
from ncclops.host.oom_kills import OomKills
from ncclops.receipts.log_receipts import PrintedReceipts
from ncclops.record import progress, shared_page
from ncclops.record.event_values import GpuFault
from ncclops.record.events import (
    STORE_LOST,
    Event,
    ExitForcedEvent,
    ExitingEvent,
    FaultEvent,
    FinishedEvent,
    GpuFaultEvent,
    NetworkOpenEvent,
    RestartEvent,
    SlowExitEvent,
    WorkerExitedEvent,
    XidEvent,
)
from ncclops.record.stop_point import StopPage
from ncclops.record.variables import OWN_WRAPPER, RETURNING

# For a worker's own children once it has ended: time to flush a log or finish an upload.
_LEFTOVER_GRACE = timedelta(seconds=5)
# For a process that only has to end: Python clears its modules, drivers let go of devices.
_EXITS_WITHIN_S = 10.0
# For a rank to notice that the job is done and to end what looks after it: some seconds at most.
_LEAVES_WITHIN_S = 30.0
# For a rank elsewhere, which knows of those that have ended here in a second, and then leaves.
_OTHERS_REPORT_WITHIN = timedelta(seconds=5)
# Where all ranks end alike there is nothing to say.
_OTHERS_END_SOON = timedelta(seconds=5)
_LOOK_FOR_CLIENTS_EVERY = timedelta(seconds=2)
# What looks for it gives up before that.
_STORE_ACCEPTS_WITHIN_S = 20.0
# Of the time that a scheduler leaves to a job that it stops.
_LATE_LIMIT = timedelta(seconds=2)
# Beside the snapshots, the writing; a file system that hangs may take no longer.
_INCIDENT_LIMIT_S = 2 * LIMIT.total_seconds() + 5.0

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
    follow: Callable[[Sequence[int]], Awaitable[None]]  # again, the records of these ranks
    printed: PrintedReceipts
    spared: Callable[[], AbstractSet[int]]  # processes that outlive an attempt
    notifying: Callable[[], AbstractSet[int]]  # of these commands, with what they have started
    coordinator: Coordinator  # the agents of the other nodes, if any
    attached: Streams  # of the rank that gets standard input, if one does
    fork_servers: ForkServers
    drain: Callable[[], None]  # have what that rank has written in its log
    oom_kills: OomKills


class RunningAttempt:
    """An attempt at ``place``. ``environ`` is what a retry adds to the plan.

    ``cannot_start`` says why the attempt came to nothing, where it did.
    """

    def __init__(self, context: AttemptContext, place: Place, environ: Mapping[str, str]) -> None:
        self.number = place.number
        self.began = time.time()
        self.team = Team(context.job.restarts_in_process, context.coordinator.others_work)
        self._is_at_work = True  # this node, as the others know it
        self.cannot_start: NcclopsError | None = None
        self._place = place
        self._context = context
        context.oom_kills.attempt_begins()
        self._job, self._run = context.job, context.job.run
        self._starts = WorkerStarts(
            context.job,
            place,
            environ,
            context.fork_servers,
            context.attached,
            context.stop,
        )
        self._server: hosted_store.StoreServer | None = None
        self._stop_page: StopPage | None = None
        self.network = NetworkWatch(self._job, context.coordinator, context.say, self._on_refusal)
        self._scan = LiveScan(
            log_files.output(self._run, place.ranks),
            context.printed,
            log_files.nccl(self._run, place.ranks),
            NetworkLines(self.network.from_thread),
        )
        self.watching = Watching(
            self._job, place.ranks, self.team, context.coordinator, context.say
        )
        self.gpu_faults: list[GpuFault] = []
        self._gpus = GpuWatch(self._job, place.ranks, self._on_xid, self._on_gpu_fault)
        self.store_ended: str | None = None  # how, where it did not outlive the workers
        self.elsewhere = False  # a rank of another node ended it, while ranks of this one ran
        self.hang: Hang | None = None  # where the attempt came to nothing because of one
        self._hang_action = HangAction(self._job, self.team, context.say, self._on_hang)
        self._replacements = Replacements(
            self.team,
            context.stop,
            enabled=lambda: self.team.grows(self._job.grows),
            refused=self._is_not_to_be_replaced,
            start=self._replace,
            lost=self._lose,
            furthest=partial(progress.highest_step, self._run.paths),
            say=context.say,
        )
        self.hang_watch = HangWatch(
            self._job,
            place.ranks,
            self.team,
            self.watching.steps_printed,
            context.coordinator,
            self.watching.on_look,
            self._on_hung,
        )
        self._team_stop: TeamStop | None = None  # once the workers are being stopped

    # --- phases -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the store and the workers."""
        self._scan.start()
        if self.cannot_start is not None:
            log.info("attempt %d cannot start: %s", self.number, self.cannot_start)
            return
        place = self._place
        log.info("attempt %d: ranks %s, store %s", self.number, place.ranks, place.store)
        try:
            environs = [self._starts.environ(rank) for rank in place.ranks]
            forks = await self._starts.fork_server(environs)
            if self._context.stop.asked:
                return  # workers would be started to be killed, and the verdict would name them
            self._server = self._start_store(forks)
            with suppress(OSError):  # without it, workers are stopped by signals alone
                self._stop_page = StopPage.create(self._run.path)
            self._gpus.start()
            for rank, environ in zip(place.ranks, environs, strict=True):
                self._spawn(rank, environ, forks)
            self.hang_watch.start()
        except (NcclopsError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and advice(error) is None:
                raise
            why = described(error)
            self.cannot_start = NcclopsError(f"cannot start attempt {self.number + 1}: {why}")

    async def watch(self) -> None:
        """Return when all workers have ended, a failure ends the attempt, or a stop was requested.

        A node in reserve has none, and watches the others.
        """
        team, stop, coordinator = self.team, self._context.stop, self._context.coordinator
        await self._context.condition.until(
            lambda: (
                (team.is_over() and not self._place.idle)
                or team.final_failure() is not None
                or stop.asked
                or self.hang
                or self.cannot_start
                or coordinator.over_for_all(entered=bool(team.entered))
            )
        )
        await self._serve_others()
        self._replacements.close()
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
        failed = [worker for worker in team.ended if team.has_failed(worker)]
        return any(team.ends_all(w) for w in failed if w.rank not in team.asked_to_stop)

    async def stop_workers(self) -> None:
        """End the workers that still run: at one point if a stop was requested, else by signals."""
        try:
            await self._stop_workers()
        finally:
            self.hang_watch.close()

    async def _stop_workers(self) -> None:
        team, context = self.team, self._context
        if team.escalation is not None and not context.stop.asked:
            # All of them are leaving by themselves and report why; most need no signal.
            done = lambda: not team.running() or context.stop.asked  # noqa: E731
            await context.condition.until(done, self._job.stop_grace)
            if not team.escalation.knows_failure:
                # A rank elsewhere may, and needs our monitor processes and our store to tell.
                await context.condition.until(self._others_have_ended, _OTHERS_REPORT_WITHIN)
        if not team.running():
            return
        others = context.coordinator.stop_agreement()
        asked = context.stop.asked or (others is not None and others.asked)
        team.announce_end("the run is stopping" if asked else "the attempt is ending")
        stop = TeamStop(
            self._job,
            team,
            context.stop,
            context.condition,
            self._stop_page,
            context.say,
            context.note,
            self.watching.steps_printed,
            others,
            self._record_late,
            spare=self._place.spare,
        )
        if self.hang is not None:
            await self._collect_snapshots()
            await stop.force(f"rank {self.hang.ranks[0]} hangs")
        elif asked and team.final_failure() is None:
            self._team_stop = stop
            await stop.run()
        else:
            await self._collect_snapshots()
            self._scan.pass_over({worker.rank for worker in team.running()})
            await stop.end_rest()

    def _others_have_ended(self) -> bool:
        return self._context.stop.asked or not self._context.coordinator.others_work()

    async def _collect_snapshots(self) -> None:
        """Of the ranks that are about to be ended because one has failed, or hangs."""
        failure = self.team.final_failure()
        if self.hang is None and self._job.restarts_in_process:
            return  # the restart core takes the snapshots
        if self.hang is None and failure is None:
            over = self._context.coordinator.over_for_all(entered=bool(self.team.entered))
            self.elsewhere = over is not None and bool(self.team.running())
            if not self.elsewhere:
                return
        failed = [] if failure is None else [failure]
        failed += [worker for worker in self.team.ended if worker is not failure]
        hung = {} if self.hang is None else dict.fromkeys(self.hang.ranks, self.hang.reason)
        await self._record(failed, hung)

    async def _record_late(self, ranks: Sequence[int], what: str) -> None:
        """Where all ranks are, of which ``ranks`` are to be ended by force for ``what``: nothing
        else will show it."""
        incident = await self._record([], dict.fromkeys(ranks, what), _LATE_LIMIT)
        if incident is not None:
            run = self._run.shown()
            self._context.say(f"where they are: `ncclops incident {run} {incident.name}`")

    async def _record(
        self, failed: Sequence[workers.Worker], hung: Mapping[int, str], limit: timedelta = LIMIT
    ) -> Path | None:
        incident = None
        with self._context.errors.recorded("taking snapshots"), suppress(OSError):
            # A full disk must not keep workers from being ended.
            record = partial(
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
                elsewhere=self.elsewhere,
                limit=limit,
            )
            incident = await in_thread(record, _INCIDENT_LIMIT_S)
        old_snapshots.tidy(self._run, self._context.say)
        return incident

    async def close(self) -> LiveDiagnosis:
        """End what is left of the attempt; what its output shows."""
        self.watching.close()
        await self._serve_until_others_stop()
        self._close_store()
        if all(ending.ok for ending in self.team.endings()):
            stay = self.own_pids() | self._context.spared()
            if (forks := workers.left_running(stay)) is not None:
                self._context.say(f"warning: {forks}")
        if survivors := process_tree.end_descendants(
            _LEFTOVER_GRACE,
            self.own_pids(),
            spared=self._context.spared(),
            trees_of_others=self._context.notifying,
        ):
            self._context.say(f"processes that SIGKILL did not end: {survivors}")
        self._context.drain()
        driver = await in_thread(self._gpus.close, last_output.LIMIT_S)
        noted = await self._noted_hang()
        hang = self.hang or self._hang_that_led_here() or noted
        context, exits, raised = self._context, self.team.failed_exits(), self.team.raised_last()
        starting_up, has_trained = self.team.starting_up(), self.watching.has_trained()

        def finish() -> LiveDiagnosis:
            return self._scan.finish(
                exits,
                hang,
                starting_up=starting_up,
                has_trained=has_trained,
                driver=driver,
                memory=self.team.told_by_kernel(),
                last_words=last_output.last_words(self._run, self.number, exits),
                raised=last_output.unwritten(self._run, self.number, raised),
            )

        diagnosis = await last_output.read(
            self._scan, finish, self._run, context.condition, context.stop, context.say
        )
        self.network.finish()
        self._context.collect_receipts()
        self.watching.finish()
        return diagnosis

    async def _noted_hang(self) -> Hang | None:
        """That of ranks whose monitor process has ended them, where no other rank has told why."""
        if not self._job.restarts_in_process:
            return None
        untold = [each for each in self.team.ended if each.rank not in self.team.why_ended]
        try:
            found = await in_thread(
                partial(why_ended, self._run.paths.incidents, untold), last_output.LIMIT_S
            )
        except TimeoutError:  # as what is to be read next will tell
            return None
        self.team.why_ended |= found
        return Hang(tuple(found), next(iter(found.values()))) if found else None

    def _hang_that_led_here(self) -> Hang | None:
        """The hang for which the workers gave up restarting in place, or ranks were ended."""
        escalation, found = self.team.escalation, self._hang_action.last
        if escalation is not None and escalation.hung is not None:
            if found is not None and escalation.hung in found.ranks:
                return found
            return Hang((escalation.hung,), escalation.reason)
        return found if found is not None and self.team.ended_for_hang & set(found.ranks) else None

    # --- what happens meanwhile ---------------------------------------------------------------

    def take_over(self, rank: int, event: Event) -> None:
        """A worker has reported something."""
        if isinstance(event, FaultEvent | RestartEvent):
            self._context.collect_receipts()
            self.watching.flush()
        first = isinstance(event, FinishedEvent) and not self.team.leaving
        worker_messages.take_over(self._run, self.team, rank, event)
        if isinstance(event, NetworkOpenEvent):
            self.network.on_open(rank, event)
        later = asyncio.get_running_loop().call_later
        if isinstance(event, ExitingEvent):
            later(_EXITS_WITHIN_S, self._end_stuck, {rank}, _EXITS_WITHIN_S)
        elif isinstance(event, SlowExitEvent):
            self._context.say(worker_messages.slow_exit_line(rank, event))
        elif first:
            later(_LEAVES_WITHIN_S, self._end_those_that_stay)
        if isinstance(event, RestartEvent) and event.instead is None:
            self._context.say(worker_messages.restart_line(event))
            old_snapshots.tidy(self._run, self._context.say)
        self._share_at_work()
        self._context.condition.notify()

    def _end_those_that_stay(self) -> None:
        """The script has ended on all ranks, and some have not noticed: they do not run Python."""
        staying = {worker.rank for worker in self.team.running()} - self.team.leaving
        self._end_stuck(staying, _LEAVES_WITHIN_S)

    def _end_stuck(self, ranks: AbstractSet[int], after_s: float) -> None:
        """The processes of ``ranks`` only had to end. A library may keep them from that."""
        later = asyncio.get_running_loop().call_later
        for worker in self.team.running():
            if worker.rank in ranks:
                self._run.add(ExitForcedEvent(rank=worker.rank, after_s=after_s))
                line = worker_messages.forced_exit_line(self.team, worker.rank, after_s)
                self._context.say(line)
                worker.send(signal.SIGKILL)
                later(process_tree.KILL_DEADLINE.total_seconds(), self._give_up, worker)

    def _give_up(self, worker: workers.Worker) -> None:
        """Wait no longer for a process that SIGKILL has not ended; ``close`` tells which it is."""
        worker.is_given_up = True
        self._context.condition.notify()

    def _on_hung(self, verdict: HangVerdict) -> None:
        if not self.team.bootstrapped:
            verdict = before_any_group(verdict, self._place.store)
        stop = self._team_stop
        if stop is None:
            self._hang_action.on_hung(verdict)
        elif stop.waits:  # for a point that this rank will not come to
            self._hang_action.tell(verdict)
            stop.give_up(f"rank {verdict.culprits[0]} hangs")

    def _on_hang(self, hang: Hang) -> None:
        log.info("hang of ranks %s ends the attempt: %s", hang.ranks, hang.reason)
        self.hang = hang
        self.team.hung = set(hang.ranks)
        self.team.last_faulty = hang.ranks[0]
        for rank in hang.ranks:
            self._gpus.judge(rank)
        self._context.coordinator.share_hang(hang.ranks[0], hang.reason)
        self._context.condition.notify()

    def _on_refusal(self, refusal: NcclopsError) -> None:
        log.info("attempt %d is refused: %s", self.number, refusal)
        self.cannot_start = self.cannot_start or refusal
        self._context.condition.notify()

    def _on_xid(self, rank: int, gpu: GpuName, number: int, what: str) -> None:
        self._run.add(XidEvent(rank=rank, xid=number, device=str(gpu), what=what))
        self._context.say(f"rank {rank}: {gpu} on node {self._run.node}: {what}")

    def _on_gpu_fault(self, fault: GpuFault) -> None:
        self.gpu_faults.append(fault)
        self._run.add(GpuFaultEvent(rank=fault.rank, fault=fault))
        self._context.say(f"rank {fault.rank}: {fault}")

    def own_pids(self) -> set[int]:
        """Children of the agent that are waited for elsewhere."""
        own = {worker.pid for worker in self.team.running()}
        return own if self._server is None else own | {self._server.process.pid}

    def _on_commands_closed(self, worker: workers.Worker) -> None:
        asyncio.get_running_loop().remove_reader(worker.commands)
        self._context.collect()
        if worker.rank not in self.team.bootstrapped and worker.runs_another_program():
            if worker.rank in self.team.entered:  # --no-python has been asked for
                log.warning("rank %d has become another program: nothing restarts it", worker.rank)
            self.team.by_themselves.add(worker.rank)

    def _on_worker_end(self, worker: workers.Worker) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        asyncio.get_running_loop().remove_reader(worker.commands)
        ended = worker.reap()
        log.info("rank %d (pid %d) %s", worker.rank, worker.pid, ended.describe())
        self._context.collect()  # before its end is judged: it may just have taken its place
        if worker.rank in self.team.returning:  # it never took the place of the one before
            self.team.returning.discard(worker.rank)
            self.team.asked_to_stop.discard(worker.rank)  # not the one whose end is told
            self.team.forget([worker])
            self._run.add(
                WorkerExitedEvent(rank=worker.rank, exit_code=ended.code, signal=ended.signal)
            )
            if not ended.ok:
                self._replace_or_lose(worker.rank)
            self._share_at_work()
            self._context.condition.notify()
            return
        self.team.ended.append(worker)
        page = self._run.paths.rank(worker.rank).progress
        if ended.signal == "SIGBUS" and shared_page.is_cut_short(page):
            self.team.explained[worker.rank] = f"{self._run.shown(page)} was truncated"
        oom_kills = self._context.oom_kills
        self.team.note_memory(worker, oom_kills.risen(), is_ruled_out=oom_kills.are_ruled_out)
        self._context.collect()  # what it reported last, before its end is judged
        self._context.collect_receipts()
        self.watching.flush()
        self.team.release()
        self._run.add(
            WorkerExitedEvent(
                rank=worker.rank,
                exit_code=ended.code,
                signal=ended.signal,
                why=self.team.out_of_memory.get(worker.rank),
            )
        )
        if self.team.has_failed(worker) and worker.rank not in self.team.asked_to_stop:
            self._gpus.judge(worker.rank)
            if not self.team.ends_all(worker):
                self._replace_or_lose(worker.rank)
            self._context.coordinator.share_failure(worker, fatal=self.team.ends_all(worker))
        self._share_at_work()
        self._context.condition.notify()

    def _replace_or_lose(self, rank: int) -> None:
        if not self._replacements.of(rank):
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        others = [] if self.team.escalation else self.team.at_work()
        self._context.lose(rank, [other.rank for other in others])
        self._context.condition.notify()

    def _share_at_work(self) -> None:
        """Tell the other nodes, of which a rank is to wait for others only as long as some work."""
        team, at_work = self.team, bool(self.team.at_work())
        if at_work != self._is_at_work and (at_work or team.returning or team.escalation):
            self._is_at_work = at_work
            self._context.coordinator.share_at_work(at_work)

    def _on_store_end(self) -> None:
        assert self._server is not None
        asyncio.get_running_loop().remove_reader(self._server.pidfd)
        how = self._server.how_it_ended(self._context.oom_kills.risen)
        store_log = self._run.paths.store_log
        self._run.add(FaultEvent(cause=STORE_LOST, kind=STORE_LOST, why=how, log=str(store_log)))
        self._context.say(f"the store server {how}: {self._run.shown(store_log)}")
        if self._job.restarts_in_process and not self.team.entered.issuperset(self._place.ranks):
            # The restart core tries to connect until its own timeout, and the others wait for it.
            number = self.number + 1
            self._on_refusal(NcclopsError(f"cannot start attempt {number}: its store server {how}"))
        # Existing groups work without it, so this is only reported; workers that still need the
        # store fail by themselves, and this line explains why.
        elif self.team.running() and self.team.final_failure() is None:
            self.store_ended = how

    # --- what the phases are made of ------------------------------------------------------------

    def _start_store(self, forks: ForkServer | None) -> hosted_store.StoreServer | None:
        place = self._place
        if place.listener is None:
            return None
        log_path = self._run.paths.store_log
        server = hosted_store.serve(place.listener, place.store.host, log_path, forks)
        asyncio.get_running_loop().add_reader(server.pidfd, self._on_store_end)
        server.keep_running()
        return server

    async def _serve_others(self) -> None:
        """Keep the store until the ranks of other nodes have ended, which go on without those of
        this one; a stop of the run ends that."""
        context = self._context
        ends = self.cannot_start is not None or self.team.escalation is not None or self.is_fatal()
        if self._server is None or not self._job.restarts_in_process or ends:
            return
        if self.team.running() or self._others_have_ended():
            return
        context.coordinator.share_at_work(False)
        if not await context.condition.until(self._others_have_ended, _OTHERS_END_SOON):
            context.note("the ranks of this node have ended; those of others go on, by its store")
            await self._until_others_have_ended(self._server)

    async def _until_others_have_ended(self, server: hosted_store.StoreServer) -> None:
        """As their agents say; once these are out of reach, as the connections to ``server`` do."""
        condition, is_cut_off = self._context.condition, self._context.coordinator.is_cut_off
        await condition.until(lambda: self._others_have_ended() or is_cut_off())
        # No event comes of the end of a connection of another process.
        while not self._others_have_ended() and server.has_clients():
            await condition.until(self._others_have_ended, _LOOK_FOR_CLIENTS_EVERY)

    async def _serve_until_others_stop(self) -> None:
        """Their ranks end at one point, and use the store until then."""
        stop, others_work = self._context.stop, self._context.coordinator.others_work
        if self._server is not None and stop.first is not None and self._job.restarts_in_process:
            ended = lambda: stop.hurry or not others_work()  # noqa: E731
            await self._context.condition.until(ended, stop.first.grace)

    def _close_store(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.pidfd)
            self._server.close()
            self._server = None

    def _is_not_to_be_replaced(self, rank: int) -> str | None:
        """Why no new process takes the place of ``rank``; None: one does."""
        for fault in self.gpu_faults:
            if fault.rank == rank:
                return str(fault)
        if (why := self.team.wrapper_that_does_not_grow()) is not None:
            return why
        return "it has the terminal" if rank == self._job.attached else None

    async def _replace(self, rank: int) -> None:
        """Raises ``NcclopsError`` where the GPU of ``rank`` turns out to be broken, or the store
        is gone, through which it would find the others."""
        await self._gpus.judged(rank)
        await in_thread(self._place.store.check, _STORE_ACCEPTS_WITHIN_S)
        if (why := self._is_not_to_be_replaced(rank)) is not None:
            raise NcclopsError(why)
        environ = self._starts.environ(rank) | {RETURNING: "1"}
        if self.team.own_wrapper is not None:
            environ[OWN_WRAPPER] = "1"
        stop = self._context.stop
        with suppress(OSError):  # a full disk; what the process reports is not read then
            await self._context.follow([rank])
        server = await self._starts.fork_server([environ])
        if self.team.goes_on() and not self.team.ending and not stop.asked:
            self._spawn(rank, environ, server)
        else:
            self.team.returning.discard(rank)
            self._context.condition.notify()

    def _spawn(self, rank: int, environ: Mapping[str, str], server: ForkServer | None) -> None:
        worker = self._starts.spawn(rank, environ, server)
        self.team.workers.append(worker)
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.pidfd, partial(self._on_worker_end, worker))
        loop.add_reader(worker.commands, partial(self._on_commands_closed, worker))
        self._starts.record(worker)
