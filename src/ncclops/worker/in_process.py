"""Runs a script under the restart core: after a fault it starts again in the same processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ncclops import restart
from ncclops.profiles.model import Growth, Restarts
from ncclops.receipts import recorder
from ncclops.record import worker_record
from ncclops.record.events import EnteredEvent, EscalationEvent, ResourceGrowthEvent
from ncclops.record.paths import RunPaths
from ncclops.record.variables import ACTIVE_RANKS, RESPAWNED_FOR, RUN_DIR, STARTED
from ncclops.record.worker_commands import RestartCommand
from ncclops.restart.exception import Escalation, RestartAbort, RestartError, StoreGone
from ncclops.restart.incident import Incident
from ncclops.timeouts.model import Timeouts
from ncclops.worker import (
    agent_commands,
    fresh,
    leftovers,
    own_wrapper,
    restart_events,
    script,
    spares,
    stopping,
)
from ncclops.worker.escalation import Repetition, SmallestWorld, as_exception
from ncclops.worker.resources import Balance, measure
from ncclops.worker.timeout_phases import TimeoutPhases


def run(
    start: Callable[[], None],
    timeouts: Timeouts,
    growth: Growth,
    restarts: Restarts,
    phases: TimeoutPhases,
) -> None:
    """Run the script with ``start`` until it ends well on all ranks.

    Raises what this rank leaves with. ``SystemExit`` with code 0 is a good end. With another code,
    and for exceptions that no restart can recover from, the rank leaves with that exit code.
    """
    recorder.current()  # starts a thread, which an interruption must not meet half-way
    leftovers.watch()
    attempts = _Attempts(start, timeouts, growth, restarts, phases)
    try:
        wraps_itself = attempts.run_wrapped()
    except (RestartAbort, StoreGone) as end:
        _show_own_failure(end)
        sys.exit(f"ncclops: {end}")
    if wraps_itself:
        attempts.run_alone()
    leftovers.end_process(0)


def _show_own_failure(end: BaseException) -> None:
    """The exception that this rank itself raised, if it did, as it would look without us."""
    cause = end.__cause__
    if isinstance(end, StoreGone) and cause is not None:
        cause = cause.__cause__  # the store's own exception says no more than ``end``
    if isinstance(cause, Exception) and not isinstance(cause, RestartError):
        show = script.without_our_frames(sys.excepthook)
        show(type(cause), cause, cause.__traceback__)


def _of_restart_core(timeouts: Timeouts) -> dict[str, Any]:
    """The wrapper's parameters, as far as they were settled."""
    limits = {
        "soft_timeout": timeouts.soft,
        "hard_timeout": timeouts.hard,
        "heartbeat_timeout": timeouts.heartbeat,
        "barrier_timeout": timeouts.barrier,
        "completion_timeout": timeouts.completion,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


class _Attempts:
    """The iterations of one script, and what is kept from one to the next."""

    def __init__(
        self,
        start: Callable[[], None],
        timeouts: Timeouts,
        growth: Growth,
        restarts: Restarts,
        phases: TimeoutPhases,
    ) -> None:
        self._start = start
        self._timeouts = timeouts
        self._phases = phases
        self._before: fresh.Snapshot | None = None
        self._balance = Balance(growth)
        self._smallest = SmallestWorld(
            restarts.min_world_size,
            at_start=int(os.environ.get(ACTIVE_RANKS) or os.environ["WORLD_SIZE"]),
        )
        self._repetition = Repetition(
            started=float(os.environ[STARTED]),
            respawned_for=os.environ.get(RESPAWNED_FOR),
        )
        self._stop = stopping.StopSignal()
        self._stop.watch()

    def run_wrapped(self) -> bool:
        """Run under the restart core; True if the script turned out to wrap itself."""
        wrapper = restart.Wrapper(
            **_of_restart_core(self._timeouts),
            initialize=spares.Entered(),
            rank_assignment=spares.assignment(os.environ.get(ACTIVE_RANKS)),
            on_incident=self._on_incident,
            incident_dir=str(RunPaths(Path(os.environ[RUN_DIR])).incidents),
        )

        def attempt(call: restart.CallWrapper) -> bool:
            return self._attempt(call)

        attempt.__annotations__["call"] = restart.CallWrapper
        wrapped = wrapper(attempt)
        self._observer = own_wrapper.watch(self._phases, leaves_script=True)
        try:
            return bool(wrapped())
        finally:
            self._phases.begin_iteration()  # whatever comes now is not under the restart core

    def run_alone(self) -> None:
        """Once more from the start, without us: the script's own wrapper restarts it."""
        self._observer.leaves_script = False
        assert self._before is not None
        self._before.restore()
        recorder.current().begin_iteration(0)
        agent_commands.on(RestartCommand, lambda _: None)  # its own wrapper finds hangs by itself
        self._start()

    def _attempt(self, call: restart.CallWrapper) -> bool:
        recorder.current().begin_iteration(call.iteration)
        if self._before is None:
            self._before = fresh.Snapshot.take()  # here, with what the restart core has set up
            worker_record.report(EnteredEvent())
        else:
            self._before.restore()
            if self._repetition.escalation is not None:
                _escalate(self._repetition.escalation)
            if (too_small := self._smallest.judge(int(os.environ["WORLD_SIZE"]))) is not None:
                _escalate(too_small)
        self._check_resources(call)
        self._phases.begin_iteration(call)
        self._stop.enter(call)
        _obey(call)
        try:
            self._start()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except own_wrapper.ScriptWrapsItself:
            return True
        recorder.current().leave()
        return False

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
        self._repetition.count(incident, recorder.current().highest_step)
        restart_events.report(incident)


def _obey(call: restart.CallWrapper) -> None:
    """Carry out the agent's commands through ``call``."""
    agent_commands.on(
        RestartCommand, lambda command: call.request_restart(command.reason, command.hung)
    )


def _escalate(escalation: Escalation) -> NoReturn:
    """End restarts in place on this rank, and request from the agent what can help."""
    worker_record.report(
        EscalationEvent(
            to=escalation.to,
            reason=escalation.reason,
            failure=escalation.failure,
            failed_start=escalation.failed_start,
        )
    )
    raise as_exception(escalation)
