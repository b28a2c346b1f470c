"""The agent: starts the workers of this node, supervises them, and writes how it ended.

Single-threaded around one event loop; a second thread writes to the terminal. Each wait is for an
event: a pidfd for a process's end, a signal, or a deadline.

    start store -> start workers -> watch -+-> all ended well ---------------> verdict
         ^                                 +-> asked to stop -> stop all ----> verdict
         |                                 +-> one failed -> stop the others -> verdict
         +-------- while restarts are left ------------------------+

This module composes: ``attempt`` is what happens between start and end of the workers,
``worker_messages`` what workers report meanwhile, ``conclusion`` the verdict.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from ncclops.agent import conclusion, leftovers, log_files, verdict_report
from ncclops.agent.attached import Attached, Streams
from ncclops.agent.attempt import AttemptContext, RunningAttempt
from ncclops.agent.condition import Condition
from ncclops.agent.control_handler import ControlHandler
from ncclops.agent.coordinator import AgentSide, Alone, Coordinate, Coordinator, LimitsChange
from ncclops.agent.diagnostics import AgentLog, InternalErrors
from ncclops.agent.fork_server import ForkServers
from ncclops.agent.fork_server_process import ForkServerProcess
from ncclops.agent.hosted_store import NOWHERE
from ncclops.agent.in_thread import in_thread
from ncclops.agent.job import Job
from ncclops.agent.live_scan import LiveDiagnosis
from ncclops.agent.moved import MoveWatch
from ncclops.agent.notifications import Notifications
from ncclops.agent.pulse import Pulse
from ncclops.agent.rendezvous_result import Place
from ncclops.agent.start_progress import StartProgress
from ncclops.agent.stop_requests import StopRequests
from ncclops.agent.team import Team
from ncclops.agent.terminal import Terminal
from ncclops.agent.worker_events import WorkerEvents
from ncclops.control.server_process import ControlServer
from ncclops.decision.as_events import classified_event, retry_event
from ncclops.decision.deciding import AttemptDecision, decide
from ncclops.decision.node_end import CannotStart, JobRules, NodeEnd
from ncclops.decision.outcome import StopRequest, describe_ending
from ncclops.decision.retrying import NextAttempt
from ncclops.durations import format_duration, format_rounded
from ncclops.errors import NcclopsError, UsageError
from ncclops.exhausted import advice, described
from ncclops.host import process_tree
from ncclops.host.oom_kills import OomKills
from ncclops.receipts.log_receipts import PrintedReceipts
from ncclops.receipts.observation import Observation
from ncclops.record import events, receipt_records, shared_page
from ncclops.record.events import EscalationEvent, Event, FaultEvent, StopRequestedEvent
from ncclops.record.receipt_records import ReceiptRecord
from ncclops.record.story_record import Story
from ncclops.record.verdict_record import (
    FirstFailure,
    JudgedReceipt,
    VerdictRecord,
    WorkerEnding,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

# What the end of a run or the next attempt needs of the run directory is waited for for so long:
# on a busy server some seconds are usual.
_FILES_LIMIT_S = 30.0
# Who has ended the run waits for its end, and not for gigabytes of its output.
_WHEN_STOPPED_S = 5.0
# What is still to be sent when all is decided; a receiver that is up takes a second.
_NOTIFY_LIMIT_S = 15.0


def run_agent(
    job: Job,
    pulse: Pulse,
    fork_server: ForkServerProcess | None = None,
    coordinate: Coordinate | None = None,
) -> int:
    """Run ``job`` to its end and return the exit code of `launch`.

    ``pulse`` shows the supervisor that the event loop turns; ``fork_server`` runs already, if there
    is one. ``coordinate`` makes the coordinator with the agents of other nodes; None for a single
    node.
    """
    began, running = time.monotonic(), _run(job, pulse, fork_server, coordinate)
    try:
        _require_descriptors()
        return asyncio.run(running)
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        running.close()  # it had not begun: no descriptors, no threads
        seconds = time.monotonic() - began
        verdict = conclusion.conclude_crash(
            job.run, error, codes=job.exit_codes, attempts=0, endings=[], seconds=seconds
        )
        verdict_report.print_crash(verdict, job.run)
        return verdict.exit_code


def _require_descriptors() -> None:
    """Those of an event loop: one that is made without them writes a traceback. ``OSError``."""
    ours, theirs = socket.socketpair()
    with ours, theirs, select.epoll():
        pass


async def _run(
    job: Job,
    pulse: Pulse,
    fork_server: ForkServerProcess | None,
    coordinate: Coordinate | None,
) -> int:
    agent = _Agent(job, pulse, fork_server, coordinate)
    try:
        pulse.follow(asyncio.get_running_loop())
        return await agent.run()
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        return agent.crash(error)


class _Agent:
    """One run on this node. To be made in the event loop; :meth:`run` goes through the phases."""

    def __init__(
        self,
        job: Job,
        pulse: Pulse,
        fork_server: ForkServerProcess | None,
        coordinate: Coordinate | None,
    ) -> None:
        self._job, self._run = job, job.run
        self._began, self._clock_offset = time.monotonic(), verdict_report.clock_offset()
        self._condition = Condition()
        self._terminal = Terminal(job)
        self._progress = StartProgress(job, self._terminal)
        self._stop = StopRequests(
            self._condition,
            job.stop_grace,
            on_request=self._on_stop_request,
            pass_on=self._pass_on,
            hold_screen=self._terminal.hold,
            forwarded=lambda: pulse.forwarded,
        )
        rank = 0 if job.attached is None else job.attached
        self._attached = Attached(job.run.paths.rank(rank).stdout_log)
        self._errors = InternalErrors(job.run)
        self._log = AgentLog(job.run, self._terminal.say)
        self._notifications = Notifications(job, self._terminal.say)
        self._control_handler = ControlHandler(
            job, self._stop, self._team, self._share_limits, self._act_before
        )
        self._control = ControlServer(
            job.run.path,
            self._control_handler,
            listeners=job.control_listeners,
            token_for_reads=job.control_token_for_reads,
            say=self._terminal.say,
        )
        self._fork_servers = ForkServers(job, self._condition, fork_server)
        self._worker_events = WorkerEvents(events.decode, self._on_worker_event)
        self._receipts = WorkerEvents(receipt_records.decode, self._on_record)
        self._printed = PrintedReceipts(job.run.path, self._from_scan_thread, job.trainers)
        self._loop = asyncio.get_running_loop()
        self._assembling = False
        self._attempt: RunningAttempt | None = None  # the present one, or the last
        self._coordinator = self._make_coordinator(coordinate)

    async def run(self) -> int:
        """The run, to its end; the exit code."""
        self._terminal.open()
        self._run.write_in_background(self._terminal.say)
        self._log.open()
        MoveWatch(self._run.path, self._terminal.say).start()
        self._notifications.start()
        self._errors.watch(self._loop)
        leftovers.sweep_in_background()
        log.info("run %s: agent %d of node %s", self._run.run_id, os.getpid(), self._run.node)
        self._stop.take(self._on_child_end)
        self._worker_events.open()
        self._receipts.open()
        self._control.start()
        self._fork_servers.open()
        last, decision = await self._run_attempts()
        self._fork_servers.close()
        self._attached.close()
        await self._coordinator.leave()
        self._worker_events.close()
        self._receipts.close()
        await self._aside("keeping progress", partial(shared_page.settle_all, self._run.path))
        await in_thread(self._run.flush, _FILES_LIMIT_S)
        ended = conclusion.Ended(
            job=self._job,
            attempts=last.number + 1,
            endings=last.team.endings(),
            decision=decision,
            receipt=await self._judge_receipt(
                decision.reason if decision.outcome == "failed" else None
            ),
            goodput=await self._aside(
                "measuring goodput",
                partial(verdict_report.measure_goodput, self._run, self._clock_offset),
            ),
            seconds=time.monotonic() - self._began,
        )
        verdict = await self._conclude(ended)
        log.info("%s (exit code %d): %s", verdict.outcome, verdict.exit_code, verdict.reason)
        limit_s = _WHEN_STOPPED_S if self._stop.signals else _NOTIFY_LIMIT_S
        await in_thread(partial(self._notifications.close, limit_s), 2 * limit_s)
        await in_thread(self._close_records, _FILES_LIMIT_S)
        self._progress.close()
        await self._control.close()  # from here on the run directory has it all
        signals = self._stop.signals
        if await self._terminal.finish(
            self._condition,
            give_up=lambda: self._stop.signals > signals or self._stop.is_orphan,
            limit=timedelta(seconds=_WHEN_STOPPED_S) if signals else None,
        ):
            with self._errors.recorded("printing the verdict"):
                verdict_report.print_verdict(
                    verdict,
                    self._run,
                    as_json=self._job.stdout_is_data,
                    quiet=self._job.quiet,
                )
        return verdict.exit_code

    def crash(self, error: Exception) -> int:
        """``error`` ends the agent, and the kernel its workers: record it. The exit code."""
        if advice(error) is None:
            self._errors.add("the agent", error)
        team = self._team()
        verdict = conclusion.conclude_crash(
            self._run,
            error,
            codes=self._job.exit_codes,
            attempts=0 if self._attempt is None else self._attempt.number + 1,
            endings=[] if team is None else team.endings(),
            seconds=time.monotonic() - self._began,
        )
        self._notifications.close(_WHEN_STOPPED_S)
        self._close_records()
        verdict_report.print_crash(verdict, self._run)
        return verdict.exit_code

    async def _conclude(self, ended: conclusion.Ended) -> VerdictRecord:
        """The verdict; of what is known here alone where the file system does not answer."""
        try:
            return await in_thread(partial(conclusion.conclude, ended), _FILES_LIMIT_S)
        except TimeoutError:
            return conclusion.conclude(ended, with_story=False)

    def _close_records(self) -> None:
        self._run.flush()
        self._job.history.flush()
        self._log.close()

    async def _aside(self, doing: str, function: Callable[[], T]) -> T | None:
        """What ``function`` makes of the run's files; None where it fails or they do not answer.

        Either is recorded.
        """
        limit_s = _WHEN_STOPPED_S if self._stop.signals else _FILES_LIMIT_S
        try:
            return await in_thread(partial(self._errors.value_of, doing, function), limit_s)
        except TimeoutError as error:
            log.warning("%s is left out: %s", doing, error.strerror)
            return None

    # --- phases -----------------------------------------------------------------------------

    def _make_coordinator(self, coordinate: Coordinate | None) -> Coordinator:
        """The agents of the other nodes, or none."""
        job = self._job
        side = AgentSide(
            condition=self._condition,
            stop=self._stop,
            say=self._terminal.say,
            note=self._note_meeting,
            rules=self._rules,
            take_limits=self._control_handler.take,
        )
        if coordinate is None:
            assert job.listener is not None  # a single node hosts its store itself
            return Alone(job, job.listener, side)
        return coordinate(job, side)

    def _note_meeting(self, note: str) -> None:
        """What the coordinator says: until the nodes have met, it is what is waited for."""
        self._terminal.note(note)
        if self._assembling:
            self._progress.meet(note)

    async def _run_attempts(self) -> tuple[RunningAttempt, AttemptDecision]:
        """Start all workers until they end well or no attempt may follow; the last attempt, and
        what was decided on it."""
        coordinator = self._coordinator
        context = AttemptContext(
            job=self._job,
            errors=self._errors,
            condition=self._condition,
            stop=self._stop,
            say=self._terminal.say,
            note=self._terminal.note,
            lose=self._terminal.lose,
            collect=self._worker_events.collect,
            collect_receipts=self._receipts.collect,
            follow=self._follow_records,
            printed=self._printed,
            spared=self._pids_that_stay,
            notifying=lambda: self._notifications.pids,
            coordinator=coordinator,
            attached=Streams() if self._job.attached is None else self._attached.open(),
            fork_servers=self._fork_servers,
            drain=self._attached.drain,
            oom_kills=OomKills(),
        )
        number, environ = 0, dict[str, str]()
        while True:
            attempt = self._attempt = await self._assemble(context, number, environ)
            end = await self._run_attempt(attempt)
            decision = await coordinator.settle(end)
            log.info("attempt %d: %s: %s", attempt.number, decision.outcome, decision.reason)
            if self._stop.launcher_lost and not end.launcher_lost:
                decision = self._decide_alone(replace(end, launcher_lost=True))
            if decision.attempt is not None:
                self._job.history.add(decision.attempt)
            following = decision.following
            if following is None or self._stop.asked:
                self._report_end_of_escalation(end)
                return attempt, decision
            self._announce(decision.retry or {}, following)
            if not await self._cool_down(following.cooldown):
                return attempt, self._decide_alone(replace(end, **self._stops()))
            number, environ = attempt.number + 1, following.environ

    async def _assemble(
        self, context: AttemptContext, number: int, environ: dict[str, str]
    ) -> RunningAttempt:
        """The next attempt; where the rendezvous fails, one that cannot start."""
        refusal, self._assembling = None, True
        if self._job.layout.nodes.count > 1:
            self._progress.meet("waiting for the nodes to meet")
        try:
            place = await context.coordinator.assemble(number)
        except (NcclopsError, OSError) as error:
            refusal = error if isinstance(error, NcclopsError) else NcclopsError(str(error))
            place = Place(number=number, layout=self._job.layout, store=NOWHERE, idle=True)
        finally:
            self._assembling = False
        rank = self._job.attached
        if rank is not None and refusal is None and rank not in place.ranks:
            node, own = rank // place.layout.nproc, place.layout.nodes.rank
            refusal = UsageError(
                f"--attach-stdin {rank}: that rank runs on node {node}, and this is node {own}:"
                " give the option there, and not here"
            )
        try:
            await self._follow(place.ranks)
        except OSError as error:
            refusal = refusal or NcclopsError(
                f"cannot start attempt {number + 1}: {described(error)}"
            )
        attempt = RunningAttempt(context, place, environ)
        attempt.cannot_start = refusal
        return attempt

    async def _run_attempt(self, attempt: RunningAttempt) -> NodeEnd:
        """From the start of the workers until none is left; how the attempt ended here."""
        await attempt.start()
        await attempt.watch()
        stop, failed = self._stop.first, attempt.failure()
        asked_elsewhere = self._coordinator.stop_elsewhere() is not None
        ended_by_others = asked_elsewhere and stop is None and bool(attempt.team.running())
        await attempt.stop_workers()
        if failed is not None:
            # The first worker to end need not be the cause; by now all have ended.
            rank, cause = attempt.failure() or failed
            self._receipts.collect()
            attempt.watching.flush()
            self._run.add(FaultEvent(rank=rank, cause=cause, attempt=attempt.number))
        diagnosis = await attempt.close()
        end = await self._node_end(attempt, stop, diagnosis, failed=failed is not None)
        return replace(end, stopped_elsewhere=ended_by_others and failed is None)

    async def _node_end(
        self,
        attempt: RunningAttempt,
        stop: StopRequest | None,
        diagnosis: LiveDiagnosis,
        *,
        failed: bool,
    ) -> NodeEnd:
        """How the attempt ended on this node, which the other nodes may need to know.

        ``stop`` is the request that has ended it, if one has.
        """
        found, team, refusal = diagnosis.report, attempt.team, attempt.cannot_start
        evidence = conclusion.evidence(found)
        if failed and not self._stop.asked:
            self._run.add(classified_event(found.verdict, conclusion.proofs(found)))
        if diagnosis.error is not None:
            self._errors.add("classifying the output", diagnosis.error)
        receipt = await self._judge_receipt() if self._job.require_receipt else None
        endings = team.blamed_first() if stop is None else team.failed_meanwhile()
        failure = await self._first_failure(endings, attempt)
        if stop is not None and failure is not None and failure.rank != team.last_faulty:
            cause = failure.message or describe_ending(failure)  # which no rank has reported
            self._run.add(FaultEvent(rank=failure.rank, cause=cause, attempt=attempt.number))
        classification = found.verdict.as_json() | {"evidence": evidence}
        story = None
        if failed or attempt.elsewhere:
            story = await self._tell(attempt, failure, classification)
        if story is not None and story.rank in team.failed_exits():
            # It failed, too, and was not the first to end.
            first = sorted(team.endings(), key=lambda ending: ending.rank != story.rank)
            failure = await self._first_failure(first, attempt)
        return NodeEnd(
            name=self._run.node,
            endings=team.endings(),
            failed=failed or refusal is not None,
            fatal=refusal is not None or (failed and attempt.is_fatal()),
            hang=None if attempt.hang is None else attempt.hang.reason,
            cannot_start=None if refusal is None else CannotStart.of(refusal, self._job.exit_codes),
            stop=stop,
            stopping=self._stop.asked,
            launcher_lost=self._stop.launcher_lost,
            failure=failure,
            classification=classification,
            story=story,
            progressed=diagnosis.steps > 0 or attempt.watching.has_trained(),
            healthy=conclusion.is_healthy(receipt),
            escalated=team.escalation,
            gpu_faults=tuple(attempt.gpu_faults),
            slow_ranks=tuple(attempt.watching.slow_ranks.values()),
            network=attempt.network.use,
            without=tuple(sorted(team.lost)),
            store_ended=attempt.store_ended,
            why_ended=team.explanations(),
            by_force=team.by_force,
        )

    async def _tell(
        self,
        attempt: RunningAttempt,
        failure: FirstFailure | None,
        classification: dict[str, Any],
    ) -> Story | None:
        """What this node can tell of the failure; None where it cannot, by a mistake of ours."""

        def tell() -> Story | None:
            from ncclops.diagnose.story import tell_attempt  # not loaded for nothing

            self._run.flush()
            return tell_attempt(
                self._run.path,
                failure,
                classification,
                node=self._run.node,
                attempt=attempt.number,
                since=attempt.began,
            )

        return await self._aside("telling what happened", tell)

    async def _first_failure(
        self, endings: Sequence[WorkerEnding], attempt: RunningAttempt
    ) -> FirstFailure | None:
        """See :func:`verdict_report.first_failure`; None as well where it cannot be read."""
        raised = attempt.team.raised_last()
        look = partial(verdict_report.first_failure, self._run, endings, attempt.number, raised)
        return await self._aside("reading what failed", look)

    async def _judge_receipt(self, failure: str | None = None) -> JudgedReceipt | None:
        """The receipt; None where it cannot be judged, by a mistake of ours."""
        look = partial(verdict_report.judge_receipt, self._run.path, self._printed, failure)
        return await self._aside("judging the receipt", look)

    def _stops(self) -> dict[str, Any]:
        """What a request to stop between two attempts changes in the end of the last one."""
        stop = self._stop.first or self._coordinator.stop_elsewhere()
        return {"stop": stop, "launcher_lost": self._stop.launcher_lost}

    def _decide_alone(self, end: NodeEnd) -> AttemptDecision:
        """Decide again after a stop that came since the last decision: no attempt follows."""
        return decide([end], self._rules(), random=random.random)

    def _rules(self) -> JobRules:
        """The rules for the decision on an attempt; its history grows with each attempt."""
        job, history = self._job, self._job.history
        return JobRules(
            retry=job.retry,
            history=tuple(history.attempts),
            granted_used=len(history.attempts) - history.earlier,
            losses_allowed=job.restarts_in_process,
            require_receipt=job.require_receipt,
            exit_codes=job.exit_codes,
        )

    def _report_end_of_escalation(self, end: NodeEnd) -> None:
        escalated = end.escalated
        if end.failed and escalated is not None and escalated.to == "respawn":
            reason = f"no further attempt is allowed after: {escalated.reason}"
            self._run.add(EscalationEvent(to="stop", reason=reason))

    def _announce(self, decided: Mapping[str, Any], following: NextAttempt) -> None:
        self._run.add(retry_event(decided, following))
        pause = f" in {format_rounded(following.cooldown)}" if following.cooldown else ""
        self._terminal.say(f"attempt {decided['attempt']}{pause}: {following.reason}")

    async def _cool_down(self, pause: timedelta) -> bool:
        """Wait before the next attempt; False when any node is asked to stop meanwhile."""
        elsewhere = self._coordinator.stop_elsewhere
        return not await self._condition.until(lambda: self._stop.asked or elsewhere(), pause)

    # --- what happens meanwhile ---------------------------------------------------------------

    def _on_worker_event(self, rank: int, event: Event) -> None:
        if self._attempt is not None:
            self._attempt.take_over(rank, event)

    def _on_record(self, rank: int, record: ReceiptRecord) -> None:
        if self._attempt is not None:
            self._attempt.watching.on_record(rank, record)

    def _on_printed(self, rank: int, seen: Sequence[Observation]) -> None:
        if self._attempt is not None:
            self._attempt.watching.on_printed(rank, seen)

    def _from_scan_thread(self, rank: int, seen: Sequence[Observation]) -> None:
        self._loop.call_soon_threadsafe(self._on_printed, rank, seen)

    async def _follow(self, ranks: Sequence[int]) -> None:
        """Make the files of these ranks, and follow them from now on. Raises ``OSError``."""
        await self._follow_records(ranks)
        self._terminal.follow(ranks)
        self._printed.follow(log_files.output(self._run, ranks))

    async def _follow_records(self, ranks: Sequence[int]) -> None:
        """Those alone that the workers report in; again, where they have been removed."""
        run = self._run
        await in_thread(partial(log_files.make, run, ranks), _FILES_LIMIT_S)
        self._worker_events.follow({rank: run.paths.rank(rank).worker_events for rank in ranks})
        self._receipts.follow({rank: run.paths.rank(rank).receipt for rank in ranks})

    def _team(self) -> Team | None:
        return None if self._attempt is None else self._attempt.team

    def _act_before(self, longest: timedelta) -> None:
        if self._attempt is not None:
            self._attempt.hang_watch.act_before(longest)

    def _share_limits(self, change: LimitsChange) -> bool:
        return self._coordinator.share_limits(change)

    def _on_child_end(self) -> None:
        if self._notifications.is_starting:
            return  # a process of ours that is not known yet; the next end of a child will do
        own = set() if self._attempt is None else self._attempt.own_pids()
        process_tree.reap_adopted(own | self._pids_that_stay())

    def _pids_that_stay(self) -> set[int]:
        """Processes of the agent that outlive an attempt."""
        own = self._notifications.pids | self._control.pids | self._fork_servers.pids
        return own | self._coordinator.pids()

    def _pass_on(self, signum: signal.Signals) -> None:
        if self._attempt is not None:
            self._attempt.team.send(signum)

    def _on_stop_request(self, request: StopRequest) -> None:
        self._run.add(
            StopRequestedEvent(
                reason=request.reason,
                grace_s=request.grace.total_seconds(),
                signal=None if request.signum is None else request.signum.name,
            )
        )
        log.info("asked to stop: %s", request)
        self._coordinator.share_stop(request)
        running = 0 if self._attempt is None else len(self._attempt.team.running())
        if not running:
            self._terminal.note(f"{request.reason}: stopping; no worker runs")
            return
        if request.signum is not None and self._stop.hurry:
            self._terminal.note(f"{request.reason} again: killing what still runs")
            return
        again = " (again to kill now)" if request.signum is not None else ""
        self._terminal.note(
            f"{request.reason}: stopping {running} worker{'s' * (running != 1)}; SIGKILL after"
            f" {format_duration(request.grace)}{again}"
        )
