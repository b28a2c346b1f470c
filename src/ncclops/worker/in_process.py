"""Runs a script under the restart core: after a fault it starts again in the same processes."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from ncclops import restart
from ncclops.classify import in_place
from ncclops.profiles.model import Growth, Restarts
from ncclops.receipts import recorder
from ncclops.record import progress, worker_record
from ncclops.record.events import (
    EnteredEvent,
    EscalationEvent,
    FinishedEvent,
    ResourceGrowthEvent,
)
from ncclops.record.paths import RunPaths
from ncclops.record.variables import (
    ACTIVE_RANKS,
    OWN_WRAPPER,
    RESPAWNED_FOR,
    RUN_DIR,
    STARTED,
)
from ncclops.record.worker_commands import RestartCommand
from ncclops.restart import _calls, blocked
from ncclops.restart._process import TRACEBACK_NOTE
from ncclops.restart._store.connections import pass_over_call
from ncclops.restart.attribution import Fault, RemoteFaultError
from ncclops.restart.exception import Escalation, RestartAbort, RestartError, StoreGone
from ncclops.restart.generations import JobEnded
from ncclops.restart.incident import Incident
from ncclops.restart.log import logged
from ncclops.restart.raised import chain_of
from ncclops.stacks.parsing import last_traceback
from ncclops.timeouts.model import Timeouts
from ncclops.worker import (
    agent_commands,
    attached,
    exiting,
    fresh,
    leftovers,
    no_restart,
    os_exit,
    own_log,
    own_wrapper,
    restart_events,
    script,
    spares,
    stopping,
)
from ncclops.worker.escalation import (
    Repetition,
    SmallestWorld,
    as_exception,
    is_replaceable,
    waited_in_vain,
)
from ncclops.worker.printed import Printed
from ncclops.worker.resources import Balance, measure
from ncclops.worker.start_up import StartUp
from ncclops.worker.timeout_phases import TimeoutPhases


def run(
    start: Callable[[], None],
    timeouts: Timeouts,
    growth: Growth,
    restarts: Restarts,
    phases: TimeoutPhases,
    starting: StartUp,
) -> None:
    """Run the script with ``start`` until it ends well on all ranks.

    Raises what this rank leaves with. ``SystemExit`` with code 0 is a good end. With another code,
    and for exceptions that no restart can recover from, the rank leaves with that exit code.
    """
    recorder.current()  # starts a thread, which an interruption must not meet half-way
    leftovers.watch()
    in_place.prepare()
    attempts = _Attempts(start, timeouts, growth, restarts, phases, starting)
    own = RunPaths(Path(os.environ[RUN_DIR])).rank(int(os.environ["RANK"]))
    handler = own_log.write_to(own.worker_log)
    if os.environ.pop(OWN_WRAPPER, None) is None:
        _run(attempts, handler)
    else:
        own_log.leave_to_script(handler)
        try:
            attempts.come_back()
        except JobEnded as end:
            own_log.log.info("%s", end)
    exiting.note_good_end()
    os_exit.end_process_if_called()
    leftovers.end_process(0)


def _run(attempts: _Attempts, handler: logging.Handler) -> None:
    try:
        wraps_itself = attempts.run_wrapped()
    except JobEnded as end:
        own_log.log.info("%s", end)
        wraps_itself = False
    except (RestartAbort, StoreGone) as end:
        if not (attempts.has_ended_well() and no_restart.is_needed()):
            _show_own_failure(end)
            own_log.log.warning("this rank leaves: %s", end)
            is_told = isinstance(end, RestartAbort) and end.escalation is not None  # by the agent
            sys.exit(1 if is_told else f"ncclops: {end}")
        wraps_itself = False  # this rank had done its part before another one failed
    else:
        if not wraps_itself:
            worker_record.report(FinishedEvent())
    if wraps_itself:
        own_log.leave_to_script(handler)
        attempts.run_alone()


def _show_own_failure(end: BaseException) -> None:
    """The exception that this rank itself raised, if it did, as it would look without us."""
    from ncclops.restart.snapshot import SnapshotError  # few scripts take snapshots

    cause = end.__cause__
    if isinstance(end, StoreGone) and cause is not None:
        cause = cause.__cause__  # the store's own exception says no more than ``end``
    # Of the restart core's own only what it raises in the script's calls.
    is_cores = isinstance(cause, RestartError) and not isinstance(cause, SnapshotError)
    if isinstance(cause, Exception) and not is_cores:
        _leave_out_other_ranks(cause)
        if sys.excepthook is sys.__excepthook__:
            sys.stderr.write("".join(_as_raised(cause).format()))
            return
        show = script.without_our_frames(sys.excepthook)
        show(type(cause), cause, cause.__traceback__)


def _as_raised(error: BaseException) -> traceback.TracebackException:
    """``error`` with the tracebacks in their places that the restart core has left in notes."""
    described = traceback.TracebackException.from_exception(error)
    for link in _links(described):
        notes = [str(note) for note in getattr(link, "__notes__", None) or ()]
        for note in notes:
            if note.startswith(TRACEBACK_NOTE):
                link.__notes__ = [other for other in notes if other is not note]
                link.stack = traceback.StackSummary.from_list(
                    (frame.file, frame.line, frame.function, code)
                    for frame, code in last_traceback(note)
                )
        script.leave_out_our_frames(link.stack)
    return described


def _links(error: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    if error is not None:
        yield error
        yield from _links(error.__cause__ or error.__context__)


def _leave_out_other_ranks(error: BaseException) -> None:
    """Their own output shows what was raised there."""
    for link in chain_of(error):
        if isinstance(link.__cause__, RemoteFaultError):
            object.__setattr__(link, "__cause__", None)  # also of a frozen dataclass


def _of_restart_core(timeouts: Timeouts) -> dict[str, Any]:
    """The wrapper's parameters, as far as they were settled."""
    limits = {
        "soft_timeout": timeouts.soft,
        "hard_timeout": timeouts.hard,
        "abort_timeout": timeouts.abort,
        "heartbeat_timeout": timeouts.heartbeat,
        "barrier_timeout": timeouts.barrier,
        "completion_timeout": timeouts.completion,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


class _TellsOfRestart(restart.abort.Abort):
    """Tells the agent that this rank restarts: the core's timeouts hold now, not the watch's."""

    limit: timedelta

    def __call__(self, state: restart.state.FrozenState) -> restart.state.FrozenState:
        recorder.current().begin_restart(self.limit)
        return state


class _TellsThatItHasLeft(restart.finalize.Finalize):
    """Tells the agent that it is not this rank for which the others wait, if they do."""

    def __call__(self, state: restart.state.FrozenState) -> restart.state.FrozenState:
        recorder.current().note_left()
        return state


class _LeavesScript(restart.finalize.Finalize):
    """``restore`` puts back what the script has made of the environment; its variables go."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore

    def __call__(self, state: restart.state.FrozenState) -> restart.state.FrozenState:
        self._restore()
        script.let_go()
        return state


class _Attempts:
    """The iterations of one script, and what is kept from one to the next."""

    def __init__(
        self,
        start: Callable[[], None],
        timeouts: Timeouts,
        growth: Growth,
        restarts: Restarts,
        phases: TimeoutPhases,
        starting: StartUp,
    ) -> None:
        self._start = start
        self._starting = starting
        self._timeouts = timeouts
        self._phases = phases
        self._before: fresh.Start | None = None
        self._balance = Balance(growth)
        self._smallest = SmallestWorld(
            restarts.min_world_size,
            at_start=int(os.environ.get(ACTIVE_RANKS) or os.environ["WORLD_SIZE"]),
        )
        self._grows = restarts.grow
        self._repetition = Repetition(
            started=float(os.environ[STARTED]),
            respawned_for=os.environ.get(RESPAWNED_FOR),
        )
        self._printed = Printed()
        self._stop = stopping.StopSignal()
        self._stop.watch()
        no_restart.watch()
        self._returned = self._raised = False  # the script, in the last iteration
        self._call: restart.CallWrapper | None = None

    def run_wrapped(self) -> bool:
        """Run under the restart core; True if the script turned out to wrap itself."""
        tells_of_restart = _TellsOfRestart()
        wrapper = restart.Wrapper(
            **_of_restart_core(self._timeouts),
            abort=restart.Compose(restart.abort.AbortTorchDistributed(), tells_of_restart),
            initialize=spares.Entered(),
            finalize=restart.Compose(
                no_restart.NoRestart(),
                _TellsThatItHasLeft(),
                _LeavesScript(self._restore_environment),
            ),
            rank_assignment=spares.assignment(os.environ.get(ACTIVE_RANKS)),
            grow_timeout=self._timeouts.grow if self._grows else None,
            on_incident=self._on_incident,
            incident_dir=str(RunPaths(Path(os.environ[RUN_DIR])).incidents),
        )

        limits = wrapper.settings
        tells_of_restart.limit = limits.abort_timeout + limits.hard_timeout + limits.barrier_timeout

        def attempt(call: restart.CallWrapper) -> bool:
            return self._attempt(call)

        attempt.__annotations__["call"] = restart.CallWrapper
        wrapped = wrapper(attempt)
        blocked.register(self._report_blocked)
        self._observer = own_wrapper.watch(self._phases, leaves_script=True)
        try:
            return bool(wrapped())
        finally:
            recorder.current().follow_main_thread(None)
            self._phases.begin_iteration()  # whatever comes now is not under the restart core

    def _restore_environment(self) -> None:
        if self._before is not None:
            self._before.restore_environment()

    def _report_blocked(self, rank: int, library: str, cause: Fault | None) -> None:
        """This process is about to be ended. What the others report, if any are left, replaces it.

        With new processes in the places of lost ranks, none is asked for where one is enough.
        """
        if not (self._grows and is_replaceable(library, cause)):
            why = None if cause is None else (cause.initial_rank, cause.detail or cause.summary)
            _report(waited_in_vain([rank], library, why))

    def come_back(self) -> None:
        """In the place of a lost rank, to a script that its own wrapper restarts by now.

        Raises ``JobEnded``.
        """
        pass_over_call()  # ours, of which the script was taken out on the other ranks
        own_wrapper.watch(self._phases)
        recorder.current().begin_iteration(0)
        agent_commands.on(RestartCommand, lambda _: None)
        self._start()

    def run_alone(self) -> None:
        """Once more from the start, without us: the script's own wrapper restarts it."""
        self._observer.leaves_script = False
        assert self._before is not None
        self._before.restore()
        recorder.current().begin_iteration(0)
        agent_commands.on(RestartCommand, lambda _: None)  # its own wrapper finds hangs by itself
        self._start()

    def _attempt(self, call: restart.CallWrapper) -> bool:
        if call.iteration > 0:
            no_restart.check()  # the command may have come since
            if self._unfinished() == frozenset():
                return False  # the job was done when a rank was lost
        self._call = call
        self._returned = self._raised = False
        recorder.current().begin_iteration(call.iteration)
        if self._before is None:
            self._before = fresh.Start()  # here, with what the restart core has set up
            worker_record.report(EnteredEvent())
        else:
            self._before.restore()
            attached.leave_debugger()
            if script.has_variables():  # callbacks and handlers referred to them until here
                gc.collect()
            if self._repetition.escalation is not None:
                _escalate(self._repetition.escalation)
            if (too_small := self._smallest.judge(int(os.environ["WORLD_SIZE"]))) is not None:
                _escalate(too_small)
        self._starting.iteration = call.iteration
        self._check_resources(call)
        self._phases.begin_iteration(call)
        recorder.current().follow_main_thread(lambda: call.main_thread_moved_at)
        _obey(call)
        script.forget_error()
        self._printed.begin()
        try:
            with os_exit.ends_script():
                self._start()
        except SystemExit as end:
            if end.code not in (None, 0):
                self._printed.explain(end)
                raise
        except Exception as error:
            self._raised = True
            self._printed.explain(error)
            raise
        except own_wrapper.ScriptWrapsItself:
            return True
        recorder.current().leave()
        self._returned = True
        call.done_with_groups()
        return False

    def has_ended_well(self) -> bool:
        """Whether the script was over on this rank, which only waited for the others."""
        return self._returned or (recorder.current().has_stopped and not self._raised)

    def _unfinished(self) -> frozenset[int] | None:
        """See ``CallWrapper.unfinished``; of a script that is still to run, ``None``."""
        return self._call.unfinished if self._returned and self._call is not None else None

    def _check_resources(self, call: restart.CallWrapper) -> None:
        """Leave without a monitor process, or when resources have grown too much over restarts."""
        if call.iteration > 0 and not call.is_monitored:
            _escalate(Escalation("respawn", "monitor process lost"))
        usage = measure()
        exceeded = self._balance.start(usage)
        if self._balance.grown:
            worker_record.report(
                ResourceGrowthEvent(
                    iteration=call.iteration,
                    grown=dict(self._balance.grown),
                    now=usage.as_json(),
                    threads_left=leftovers.threads.names(),
                    exceeded=exceeded,
                )
            )
        if exceeded is not None:
            _escalate(Escalation("respawn", exceeded))

    def _on_incident(self, incident: Incident) -> None:
        if self._repetition.escalation is not None:
            return  # this rank leaves because of it
        furthest, updates = _progress(incident.initial_rank)
        escalation = self._repetition.count(
            incident,
            furthest,
            updates=updates,
            starting_up=self._starting.was_starting,
            unfinished=self._unfinished(),
        )
        restart_events.report(incident, None if escalation is None else escalation.to)
        if incident.rank is None and escalation is not None:
            _report(escalation)  # this rank leaves by itself, and so may all others


def _progress(rank: int) -> tuple[int | None, int | None]:
    """The highest step that a rank of this host has reached, as far as any reports its steps or, at
    least, this one takes snapshots, and the updates of the optimizer of ``rank`` since the script
    was started. None as well where the script has left nothing to read that with: its restarts have
    to be counted in any case."""
    call = _calls.current()
    in_snapshots = None if call is None else call.reached
    furthest: int | None = None
    with logged("reading how far the job has come"):
        paths = RunPaths(Path(os.environ[RUN_DIR]))
        steps = (progress.highest_step(paths), recorder.current().highest_step)
        furthest = max((step for step in steps if step is not None), default=in_snapshots)
        if (own_page := progress.read(paths.rank(rank).progress)) is not None:
            return furthest, own_page.updates or None
    return in_snapshots if furthest is None else furthest, None


def _obey(call: restart.CallWrapper) -> None:
    """Carry out the agent's commands through ``call``."""
    agent_commands.on(
        RestartCommand, lambda command: call.request_restart(command.reason, command.hung)
    )


def _report(escalation: Escalation) -> None:
    worker_record.report(
        EscalationEvent(
            to=escalation.to,
            reason=escalation.reason,
            failure=escalation.failure,
            failed_start=escalation.failed_start,
            passing=escalation.passing,
            hung=escalation.hung,
        )
    )


def _escalate(escalation: Escalation) -> NoReturn:
    """End restarts in place on this rank, and request from the agent what can help."""
    _report(escalation)
    raise as_exception(escalation)
