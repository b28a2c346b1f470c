"""The agent: starts the workers of this node, supervises them, and writes how it ended.

Single-threaded around one event loop; what the terminal shows has a thread of its own. Each
wait is for an event: a pidfd for a process's end, a signal, or a deadline.

    start store -> start workers -> watch -+-> all ended well ---------------> verdict
         ^                                 +-> asked to stop -> stop all ----> verdict
         |                                 +-> one failed -> stop the others -> verdict
         +-------- while restarts are left ------------------------+
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from ncclops.classify import Report
from ncclops.classify.policy import Attempt, Decision
from ncclops.durations import format_duration
from ncclops.env import snapshot
from ncclops.errors import NcclopsError, ReceiptMissing
from ncclops.launch import logs, proctree, report, store, workers
from ncclops.launch.echo import Echo
from ncclops.launch.history import JobHistory
from ncclops.launch.inbox import Inbox
from ncclops.launch.livescan import Diagnosis, LiveScan
from ncclops.launch.options import Shown
from ncclops.launch.retrying import Escalated, NextAttempt, RetryPlan, next_attempt
from ncclops.launch.rundir import RunDirectory
from ncclops.launch.screen import Screen
from ncclops.launch.stopping import StopSignals
from ncclops.launch.team import Team
from ncclops.launch.verdict import Verdict, judge
from ncclops.receipts import pages
from ncclops.worker.variables import AGENT_PID, STARTED

# For a worker's own children once it has ended: time to flush a log or finish an upload.
_EVIDENCE_LINES = 5
_LEFTOVER_GRACE = timedelta(seconds=5)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the agent needs, checked and settled before it starts.

    ``environs`` is the environment under the plan, one per local rank; what identifies a worker
    is added at each attempt. ``listener`` is the store's socket where this node hosts the store.
    """

    run: RunDirectory
    argv: list[str]
    environs: list[Mapping[str, str]]
    layout: workers.Layout
    job_id: str
    retry: RetryPlan
    history: JobHistory  # attempts of this job, under earlier agents too
    stop_grace: timedelta
    shown: Shown
    restarts_in_process: bool  # a worker that ends does not end the others
    listener: socket.socket | None
    require_receipt: bool = False  # a run without a healthy receipt is not a success
    stdout_is_data: bool = False  # with --json: workers' output goes to stderr instead


def run_agent(job: Job) -> int:
    """Run ``job`` to its end and return the exit code of `launch`."""
    return asyncio.run(_Agent(job).run())


class _Agent:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._run = job.run
        self._team = Team(job.restarts_in_process)
        self._diagnosis: Diagnosis | None = None
        self._decision: Decision | None = None
        self._receipt: dict[str, Any] | None = None
        self._server: store.StoreServer | None = None
        self._changed = asyncio.Event()  # a worker ended, or a signal came
        self._interrupted_by: signal.Signals | None = None  # where the stop decided the outcome
        self._cannot_start: str | None = None
        self._began = time.monotonic()
        self._ranks = [job.layout.rank(local) for local in range(job.layout.nproc)]
        self._stop = StopSignals(
            self._changed,
            on_first=self._on_first_stop,
            pass_on=self._pass_on,
        )

    async def run(self) -> int:
        logs.make(self._run, self._ranks)
        stdout = sys.stderr if self._job.stdout_is_data else sys.stdout
        self._echo = Echo(
            logs.shown(self._run, self._ranks, self._job.shown),
            Screen(stdout.buffer, sys.stderr.buffer),
        )
        self._echo.start()
        self._stop.take(self._on_child_end)
        events = {rank: self._run.worker_events(rank) for rank in self._ranks}
        self._inbox = Inbox(events, self._on_worker_event)
        self._inbox.open()
        attempts = await self._run_attempts()
        self._inbox.close()
        pages.settle_all(self._run.path)
        self._receipt = await asyncio.to_thread(report.judge_receipt, self._run.path)
        verdict = self._conclude(attempts)
        if await self._finish_echo():
            report.print_verdict(verdict, self._run, as_json=self._job.stdout_is_data)
        return verdict.exit_code

    # --- phases -----------------------------------------------------------------------------

    async def _run_attempts(self) -> int:
        """Start all workers until they end well or no attempt may follow; how often that was."""
        history, number = self._job.history, 0
        environ: dict[str, str] = {}
        while True:
            scan = LiveScan(logs.output(self._run, self._ranks))
            scan.start()
            try:
                self._spawn(number, environ)
            except (NcclopsError, OSError) as error:
                self._cannot_start = f"cannot start attempt {number + 1}: {error}"
            await self._watch()
            self._interrupted_by = self._stop.first
            failed = self._team.final_failure()
            await self._stop_workers()
            if failed is not None:
                # The first to end need not be the one to blame; by now all have ended.
                failed = self._team.final_failure() or failed
                self._run.event("fault", rank=failed.rank, cause=str(failed.exit), attempt=number)
            self._close_store()
            self._end_leftovers()
            self._diagnosis = await asyncio.to_thread(
                scan.finish,
                self._team.failed_statuses(),
                starting_up=not self._team.bootstrapped,
            )
            if failed is None or self._stop.first is not None or self._cannot_start:
                return number + 1
            following = self._decide(history)
            number += 1
            if following is None or not await self._cool_down(following.cooldown):
                return number
            environ = following.environ

    def _decide(self, history: JobHistory) -> NextAttempt | None:
        """Classify the attempt that has failed, add it to ``history``, and say what follows."""
        assert self._diagnosis is not None
        report, progressed = self._diagnosis.report, self._diagnosis.steps > 0
        self._run.event("classified", **report.verdict.as_json(), evidence=_lines(report))
        escalated = self._team.escalation
        decision, following = next_attempt(
            self._job.retry,
            report.verdict,
            escalated=escalated,
            history=history.attempts,
            granted_used=len(history.attempts) - history.earlier,
            progressed=progressed,
            random=random.random,
        )
        self._decision = decision
        if escalated is not None and escalated.to == "respawn" and following is None:
            reason = f"no further attempt is allowed after: {escalated.reason}"
            self._run.event("escalation", to="stop", reason=reason)
        history.add(Attempt.of(report.verdict, progressed=progressed))
        if following is not None:
            told = {"reason": following.reason, "changes": following.environ}
            self._run.event("retry", **decision.as_json() | told)
            changes = ", ".join(f"{k}={v}" for k, v in following.environ.items())
            pause = f" in {format_duration(following.cooldown)}" if following.cooldown else ""
            self._echo.say(
                f"attempt {decision.attempt}{pause}: {following.reason}"
                + (f" ({changes})" if changes else "")
            )
        return following

    async def _cool_down(self, pause: timedelta) -> bool:
        """Wait before the next attempt; False when we are asked to stop meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause.total_seconds()):
                while self._stop.first is None:
                    await self._next_change()
        self._interrupted_by = self._stop.first
        return self._stop.first is None

    def _spawn(self, number: int, environ: dict[str, str]) -> None:
        # A store for each attempt: torch's keys carry no attempt, and those of the last one would
        # be taken for answers.
        self._server = self._start_store(number)
        layout = self._job.layout
        attempt = workers.Attempt(
            number=number,
            most=self._job.retry.granted,
            job_id=self._job.job_id,
            store=self._store_address(),
        )
        self._team = Team(self._job.restarts_in_process)
        started = f"{time.time():.3f}"
        loop = asyncio.get_running_loop()
        for local_rank, planned in enumerate(self._job.environs):
            rank = layout.rank(local_rank)
            full = {
                **planned,
                **environ,
                **workers.identity(layout, attempt, local_rank),
                "TORCHELASTIC_ERROR_FILE": str(self._run.error_file(rank, number)),
                AGENT_PID: str(os.getpid()),
                STARTED: started,
            }
            with suppress(OSError):  # for `env diff` of two ranks; no reason not to start
                snapshot.write(full, self._run.rank_dir(rank) / snapshot.FILE_NAME)
            worker = workers.Worker.spawn(rank, self._job.argv, full, self._run)
            self._team.workers.append(worker)
            loop.add_reader(worker.pidfd, partial(self._on_worker_end, worker))
            self._run.event("worker-started", rank=rank, pid=worker.pid, attempt=number)

    async def _watch(self) -> None:
        """Return when all workers have ended, one has failed for good, or we are to stop."""
        team = self._team
        while team.running() and team.final_failure() is None and self._stop.first is None:
            if self._cannot_start:
                return
            await self._next_change()

    async def _stop_workers(self) -> None:
        """SIGTERM, the grace time, SIGKILL, for the workers that are still there."""
        team = self._team
        if team.escalation is not None and self._stop.first is None:
            # All of them are on their way out, with something to say; most need no signal.
            await self._wait_for_end(self._job.stop_grace, unless_stopped=True)
        if not team.running():
            return
        team.asked_to_stop = {worker.rank for worker in team.running()}
        team.send(signal.SIGTERM)
        await self._wait_for_end(self._job.stop_grace)
        if team.running():
            ranks = [worker.rank for worker in team.running()]
            self._run.event("stop-requested", signal="SIGKILL", ranks=ranks)
            team.send(signal.SIGKILL)
            await self._wait_for_end(proctree.KILL_DEADLINE, hurried=False)

    def _conclude(self, attempts: int) -> Verdict:
        """The verdict, written down; the terminal may come later or never."""
        in_order = self._team.endings()
        outcome, code, reason = judge(
            in_order,
            stopped_by=self._interrupted_by,
            launcher_lost=self._stop.launcher_lost,
            losses_allowed=self._job.restarts_in_process,
            cannot_start=self._cannot_start,
        )
        if outcome == "completed" and self._job.require_receipt and not self._is_healthy():
            outcome, code = "no-receipt", ReceiptMissing.exit_code
            reason += "; --require-receipt asked for a healthy receipt, and there is none"
        failure = None
        if outcome == "failed":
            failure = report.first_failure(self._run, self._team.blamed_first(), attempts - 1)
        verdict = Verdict(
            run_id=self._run.run_id,
            outcome=outcome,
            exit_code=code,
            reason=reason,
            attempts=attempts,
            seconds=round(time.monotonic() - self._began, 3),
            first_failure=failure,
            workers=sorted(in_order, key=lambda ending: ending.rank),
            classification=self._classification() if outcome == "failed" else None,
            receipt=self._receipt,
        )
        self._run.write_verdict(verdict.to_json())
        self._run.event("verdict", outcome=outcome, exit_code=code, reason=reason)
        return verdict

    async def _finish_echo(self) -> bool:
        """Show what is left; False if the terminal does not take it and we are asked to end.

        In a thread of its own, which nobody waits for: a terminal may block for ever.
        """
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        signals_before = self._stop.count

        def finish() -> None:
            self._echo.finish()
            loop.call_soon_threadsafe(done.set)
            loop.call_soon_threadsafe(self._changed.set)

        threading.Thread(target=finish, name="ncclops-echo-end", daemon=True).start()
        while not done.is_set() and self._stop.count == signals_before and not self._stop.is_orphan:
            await self._next_change()
        return done.is_set()

    def _is_healthy(self) -> bool:
        return self._receipt is not None and self._receipt["verdict"] == "healthy"

    def _classification(self) -> dict[str, Any] | None:
        if self._diagnosis is None:
            return None
        report = self._diagnosis.report
        decision = None if self._decision is None else self._decision.as_json()
        return report.verdict.as_json() | {"evidence": _lines(report), "decision": decision}

    # --- what the phases are made of ----------------------------------------------------------

    def _start_store(self, number: int) -> store.StoreServer | None:
        listener, nodes = self._job.listener, self._job.layout.nodes
        if listener is None:
            return None
        if number > 0:  # the first was bound before anything started, to refuse a taken port early
            listener = store.listen(host=nodes.master_host, port=nodes.master_port)
        server = store.serve(listener, nodes.master_host, self._run.store_log)
        asyncio.get_running_loop().add_reader(server.pidfd, self._on_store_end)
        return server

    def _store_address(self) -> store.StoreAddress:
        if self._server is not None:
            return self._server.address
        nodes = self._job.layout.nodes
        assert nodes.master_host is not None  # a single node always hosts the store itself
        return store.StoreAddress(nodes.master_host, nodes.master_port)

    def _close_store(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.pidfd)
            self._server.close()
            self._server = None

    def _on_store_end(self) -> None:
        assert self._server is not None
        asyncio.get_running_loop().remove_reader(self._server.pidfd)
        # Groups that are up go on without it, so this is reported and not acted upon; workers
        # that still need it fail by themselves, with this line above to explain it.
        self._run.event("fault", cause="store-lost", log=str(self._run.store_log))
        self._echo.say(f"the store server ended: {self._run.shown(self._run.store_log)}")

    def _on_worker_event(self, rank: int, record: dict[str, Any]) -> None:
        team, event = self._team, record.get("event")
        match event:
            case "entered":
                team.entered.add(rank)
                return
            case "ready-to-end":
                team.ready_to_end.add(rank)
                team.release()
                return
            case "bootstrapped":
                team.bootstrapped.add(rank)
            case "escalation":
                if team.escalation is not None:  # all ranks say it; once is enough
                    return
                team.escalation = Escalated.of(record)
            case "fault":
                rank = record.pop("of_rank", rank)  # told for one that is dead
                team.last_faulty = rank
            case "restart" | "compile-warmup" | "group-timeout" | "resource-growth" | "own-wrapper":
                pass
            case _:
                return  # not ours: scripts may write to the directory too
        fields = {k: v for k, v in record.items() if k not in ("event", "rank", "node")}
        self._run.event(str(event), rank=rank, **fields)

    def _on_worker_end(self, worker: workers.Worker) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        ended = worker.reap()
        self._team.ended.append(worker)
        self._inbox.collect()  # its last words, before anybody draws conclusions
        self._team.release()
        self._run.event(
            "worker-exited", rank=worker.rank, exit_code=ended.code, signal=ended.signal
        )
        self._changed.set()

    def _on_child_end(self) -> None:
        proctree.reap_adopted(self._own_pids())

    def _own_pids(self) -> set[int]:
        """Children with a waiter of their own."""
        own = {worker.pid for worker in self._team.running()}
        return own if self._server is None else own | {self._server.process.pid}

    def _pass_on(self, signum: signal.Signals) -> None:
        self._team.send(signum)  # whichever team there is by then

    def _on_first_stop(self, signum: signal.Signals) -> None:
        self._run.event("stop-requested", signal=signum.name)
        grace = format_duration(self._job.stop_grace)
        self._echo.say(
            f"{signum.name}: stopping {len(self._team.running())} workers with SIGTERM,"
            f" SIGKILL after {grace} (once more to kill now)"
        )

    def _end_leftovers(self) -> None:
        """End what the workers started and left running."""
        if survivors := proctree.end_descendants(_LEFTOVER_GRACE, self._own_pids()):
            self._echo.say(f"processes that SIGKILL did not end: {survivors}")

    async def _next_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def _wait_for_end(
        self, limit: timedelta, *, hurried: bool = True, unless_stopped: bool = False
    ) -> None:
        """Until no worker runs, ``limit``, or a signal that lets us wait no longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit.total_seconds()):
                while self._team.running() and not (hurried and self._stop.hurry):
                    if unless_stopped and self._stop.first is not None:
                        return
                    await self._next_change()


def _lines(report: Report) -> list[dict[str, Any]]:
    return [line.as_json() for line in report.evidence[:_EVIDENCE_LINES]]
