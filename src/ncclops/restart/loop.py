"""The restart loop: a visible sequence of named phases.

::

    join ─► enter ─► run ─┬─ all done ─► complete
              ▲           │
              │           └─ fault ─► detect ─► abort ─► leave ─► finalize ─► health check
              │                                                                   │
              └────────────────────── assign ◄── (grow) ◄────── barrier ◄─────────┘

In ``grow``, where lost ranks come back, all join anew with them (``generations.py``). A function
that keeps going (``keep_going.py``) goes through the same phases, from inside.

``detect``, ``collect`` (a snapshot of this rank, where a hook for that was handed in) and ``abort``
happen in the monitor thread; ``leave`` is this thread's way out of the function. Any phase may end
with this rank *leaving*: it records that in the ledger, and the others continue without it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import queue
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch import distributed
from torch.distributed import Store

from ncclops.restart import _calls
from ncclops.restart._checkpoint_process import end_checkpoint_process
from ncclops.restart._cut_imports import let_import_again
from ncclops.restart._endings import (
    Failed,
    Finished,
    ForkedChild,
    InReserve,
    Leaving,
    follows_from_abort,
    judge_exit,
)
from ncclops.restart._groups import kept_beside
from ncclops.restart._groups.aborting import forget_failed_groups
from ncclops.restart._groups.cuda_graphs import refuse_graphs_over_dead_groups
from ncclops.restart._groups.ending import (
    end_groups_in_a_thread,
    finish_operations_before_groups_end,
    keep_backends_longer_than_groups,
)
from ncclops.restart._groups.gloo_sockets import close_gloo_connections
from ncclops.restart._groups.open_operations import operations_are_open, watch_groups_of_operations
from ncclops.restart._groups.rendezvous import env_leads_to
from ncclops.restart._groups.tables import undo_excepthook_of_torch
from ncclops.restart._inbox import Inbox, store_gone
from ncclops.restart._interrupt.signal_handlers import contain_handlers, release_handlers
from ncclops.restart._monitor.link import Watch
from ncclops.restart._observer import place
from ncclops.restart._process import freeze_heap, release
from ncclops.restart._store.client import StoreClient
from ncclops.restart._store.connections import Connections
from ncclops.restart._torch_state import TorchState
from ncclops.restart.agreement import INITIAL, Arrival
from ncclops.restart.attribution import Causes, Fault, FaultKind
from ncclops.restart.compiler_import import keep_compiler_unloaded
from ncclops.restart.exception import (
    Escalation,
    HealthCheckError,
    InternalError,
    NameSpaceUsed,
    RankShouldRestart,
    RestartAbort,
    RestartError,
    StoreGone,
    TimeoutError,  # noqa: A004 - the public API's name
)
from ncclops.restart.generations import Generation
from ncclops.restart.health_check import HealthCheck
from ncclops.restart.incident import Account
from ncclops.restart.log import logged
from ncclops.restart.monitor_thread import (
    Aborted,
    Agreed,
    Completed,
    MonitorMessage,
)
from ncclops.restart.raised import all_behind
from ncclops.restart.rank_assignment import RankDiscarded
from ncclops.restart.regroup import Regrouped, Rung
from ncclops.restart.returning import await_join, find_generation
from ncclops.restart.session import Session
from ncclops.restart.settings import Settings
from ncclops.restart.state import FrozenState, Mode, State, take_returning

log = logging.getLogger("ncclops.restart")

# Between a fault in the ledger and the monitor thread's message about it are two messages of the
# store. When they take this long, the store does not work.
_STORE_ANSWERS_WITHIN = timedelta(seconds=60)

# A rank that is done with its groups keeps them for so long while the others are not: mostly they
# are soon.
_GROUPS_OUTLIVE_FUNCTION = timedelta(seconds=3)


class RestartLoop:
    """One call of a wrapped function on one rank.

    ``call`` runs the function once; ``restart_health_check`` is the check on the way to a
    restart, which may look at more than the one at the start of an iteration.
    """

    def __init__(
        self,
        settings: Settings,
        state: State,
        call: Callable[[], Any],
        restart_health_check: HealthCheck,
    ) -> None:
        self._settings = settings
        self._restart_health_check = restart_health_check
        self._state = state
        self._call = call
        self._connections: Connections | None = Connections(settings)
        self._grows = settings.grow_timeout is not None
        if self._grows and self._connections.is_inner:
            raise ValueError("grow_timeout is for the outermost wrapped function: leave it out")
        generation = Generation()
        if self._grows and take_returning(os.environ):
            rank, size = state.initial_rank, state.initial_world_size
            generation = find_generation(self._connections, rank, size)
            state.join_anew(generation.first_iteration)
        self._causes = Causes(state.initial_rank)
        self._begin_session(generation)
        self._account = Account(
            self.session.incidents,
            settings.on_incident,
            self._record_lost,
            settings.on_regrouped,
        )
        self._caught: BaseException | None = None  # what has left the function in this iteration
        self._returned = False  # from the function in this iteration
        self.done_with_groups = False  # see CallWrapper, as is ``unfinished``
        self.unfinished: frozenset[int] | None = None
        self._torch_state = TorchState()
        self._ended_inside: BaseException | None = None  # what a restart inside has ended with
        self.pid = os.getpid()
        self.as_call = _calls.Call(
            state=state.freeze,
            connect=self._another_connection,
            aborted=lambda: self.session.is_aborted(state.iteration),
            atomic=self._atomic,
        )

    def _atomic(self) -> contextlib.AbstractContextManager[None]:
        return self.session.interrupter.atomic()

    def _record_lost(self, directory: Path, rank: int, reason: str) -> None:
        self.session.record_lost(directory, rank, reason)

    def note_regrouped(self, *regrouped: Regrouped) -> None:
        """Groups have come to the members of the present iteration. Main thread."""
        if regrouped:
            with self.session.interrupter.atomic():
                self._account.regrouped(regrouped)

    def _begin_session(self, generation: Generation) -> None:
        assert self._connections is not None
        session = Session(self._settings, self._state, self._connections, generation)
        self.session = session
        self._page = session.monitor_process.page
        self._inbox = Inbox(
            self._settings,
            session.monitor_thread,
            session.ledger,
            self._causes,
            session.ask_to_look_again,
        )

    @property
    def iteration(self) -> int:
        """The present iteration, from 0."""
        return self._state.iteration

    def frozen_state(self) -> FrozenState:
        """This rank's numbers in it."""
        return self._state.freeze()

    def run(self) -> Any:
        """The value of the function (``None`` on a reserve) once all ranks have finished.

        Raises what this rank leaves with; the exceptions of the function on the way there are
        chained to it.
        """
        error: BaseException | None = None
        try:
            contain_handlers()
            _calls.begin(self.as_call)
            with self._env_rendezvous():
                return self._run_iterations()
        except ForkedChild as child:
            if child.error is None:
                return child.value
            error = child.error
        except Leaving as leaving:
            error = leaving.error
        except distributed.DistNetworkError as failure:
            error = store_gone(failure)
            error.__cause__ = failure
            self._causes.note(error)
        except BaseException as unexpected:  # noqa: BLE001 - Ctrl-C in a wait, for example
            error = unexpected
            self._causes.note(unexpected)
            self._report_unexpected_end(unexpected)
        finally:
            if os.getpid() == self.pid:
                _calls.end(self.as_call)
                self.session.close(error)
                self._connections = None
            release_handlers()
        raise self._causes.with_root_cause(error)

    def _run_iterations(self) -> Any:
        self._join()
        while not isinstance(ending := self._run_iteration(), Finished):
            if ending is not None:
                self._restart(ending)
        return self._complete(ending.value)

    def _run_iteration(self) -> Finished | Failed | None:
        """``_iterate``, also when the last interruption arrives in its own last statements."""
        try:
            return self._iterate()
        except RankShouldRestart as late:
            self.settle()
            self.session.function_left()
            self._page.watch = Watch.NONE
            self._caught = late
            return self._await_abort(Failed())

    # --- join ---------------------------------------------------------------------------------

    def _join(self) -> None:
        """The barrier before the first iteration, and the first assignment."""
        session, timeout = self.session, self._settings.barrier_timeout
        self._come_to_join()
        keep_backends_longer_than_groups()
        finish_operations_before_groups_end()
        watch_groups_of_operations()
        keep_compiler_unloaded()
        refuse_graphs_over_dead_groups()
        freeze_heap()
        if session.generation.number:  # this rank has come back
            agreed = self._inbox.agreement(INITIAL)
            session.connect_ring_of(agreed.agreement.gone)
        else:
            session.connect_ring(timeout)
            agreed = self._inbox.agreement(INITIAL)
            session.add_successors(agreed.agreement.gone)
        self._assign(agreed)
        self._enter_iteration(agreed)

    def _come_to_join(self) -> None:
        session = self.session
        session.monitor_thread.expect_agreement(INITIAL)
        session.ledger.publish_address(self._state.initial_rank, session.monitor_process.address)
        self._arrive(INITIAL)

    def _enter_iteration(self, agreed: Agreed) -> None:
        session, iteration = self.session, self._state.iteration
        session.enter(iteration, agreed.agreement)
        if self._grows and self._state.rank == 0:
            session.ledger.generations.note_iteration(iteration)

    # --- grow ---------------------------------------------------------------------------------

    def _grow(self, agreed: Agreed) -> Agreed:
        """Join anew, with those that come back: the agreement about who is there now."""
        session, connections = self.session, self._connections
        assert connections is not None
        first = None if session.incidents is None else session.incidents.first
        proposal = session.generation.after(agreed.agreement, first)
        generation = session.ledger.generations.open_next(proposal)
        session.close()
        connections.enter_generation(generation.number)
        self._state.join_anew(generation.first_iteration)
        self._begin_session(generation)
        self._come_to_join()
        joined = await_join(
            self._inbox,
            self.session.ledger,
            self._state,
            self._settings,
            self.session.record_gone,
        )
        self.session.connect_ring_of(joined.agreement.gone)
        return joined

    # --- enter and run ------------------------------------------------------------------------

    def _iterate(self) -> Finished | Failed | None:
        """One iteration: the function on an active rank, waiting on a reserve.

        Of one that keeps going, several. ``None``: the next one has begun, for a reserve.
        """
        state = self._state
        self._prepare(self._torch_state)
        value, caught = None, None
        try:
            try:
                value = self._run_armed()
            finally:
                self.settle()
        except BaseException as error:  # noqa: BLE001 - judged below
            caught = error
        if os.getpid() != self.pid:
            raise ForkedChild(value, caught)
        self.settle()
        if self._ended_inside is not None:  # whatever the function has made of it
            ended, self._ended_inside = self._ended_inside, None
            if isinstance(ended, InReserve):
                return None
            raise ended
        if caught is not None:
            return self._end_iteration(caught)
        self._leave_function(None)
        if state.mode is Mode.ACTIVE:
            rank, size = state.active_rank, state.active_world_size
            assert rank is not None and size is not None
            returned = Fault.of_early_return(state.initial_rank, state.rank, state.iteration)
            self.session.ledger.record_completion(state.iteration, rank, size, returned)
            self._returned = True
        return self._await_outcome(value)

    def _prepare(self, torch_state: TorchState) -> None:
        """Nothing of the last iteration is left when the function begins."""
        self._state.set_distributed_vars()
        self._page.touch()
        self._page.watch = Watch.HARD  # destroying a group may hang
        self._page.abort_began = self._page.now()
        forget_failed_groups()
        self._page.abort_began = 0.0
        undo_excepthook_of_torch()
        let_import_again()
        torch_state.restore()
        self._returned = self.done_with_groups = False

    def _run_armed(self) -> Any:
        try:
            self.enter_armed()
            if self._state.mode is Mode.ACTIVE:
                return self._call()
            return None
        finally:
            self.session.interrupter.armed = False  # first and without a call: see Interrupter

    def enter_armed(self) -> None:
        """From here on the monitor thread may interrupt this one; initialize and health check."""
        # Armed before the monitor thread watches: it must not interrupt a thread that is not armed.
        self.session.interrupter.arm(RestartLoop._run_armed.__code__)
        self.session.monitor_thread.watch(self._state.iteration, self._state.freeze())
        self._page.touch()
        self._page.watch = Watch.SOFT_AND_HARD
        release_handlers()
        self._enter()

    def settle(self) -> None:
        """Nothing interrupts this thread any more, once ``armed`` is False."""
        self.session.interrupter.settle()
        contain_handlers()

    def _leave_function(self, caught: BaseException | None) -> None:
        self.session.function_left()
        end_groups_in_a_thread()
        self._page.watch = Watch.NONE
        self._caught = caught

    def _end_iteration(self, caught: BaseException) -> Finished | Failed:
        """The function was left with ``caught``: judge that, and wait for the abort."""
        self._leave_function(caught)
        self._page.touch()
        self._page.watch = Watch.HARD  # code of the exception's class runs, such as __str__
        self.session.note_function_left(caught)
        failed = self._judge(caught)
        self._page.watch = Watch.NONE
        if failed.fault is not None:
            self.session.ledger.record_fault(self._state.iteration, failed.fault)
        return self._await_abort(failed)

    def restart_inside(self, caught: BaseException, torch_state: TorchState) -> None:
        """The way to the next iteration, from within the function; the thread is not armed.

        What it ends with leaves the function, and then the loop.
        """
        try:
            ending = self._end_iteration(caught)
            assert isinstance(ending, Failed)  # others cannot finish without an active rank
            self._restart(ending)
            if self._state.mode is not Mode.ACTIVE:
                raise InReserve
            self._prepare(torch_state)
        except BaseException as end:
            self._ended_inside = end
            raise

    def _enter(self) -> None:
        """Initialize and health check; then a restart has succeeded and is reported."""
        if not self._state.active_world_size:
            raise RestartAbort("the rank assignment leaves no active rank")
        place("initialize")
        self._callback(self._settings.initialize)
        place("health_check")
        self._check_health(self._settings.health_check)
        with self.session.interrupter.atomic():  # the next fault may come at once: no report is cut
            self._account.restarted(self._state)

    def _judge(self, error: BaseException) -> Failed:
        """What ``error``, which left the armed part, means for this rank."""
        state = self._state
        interrupted = self.session.monitor_thread.fault_seen_in == state.iteration
        error, kind = judge_exit(error, interrupted)
        if kind is None:
            return Failed()
        gone = kind is FaultKind.LEFT
        fault = self._fault(error, kind, gone=gone, secondary=interrupted)
        if interrupted and not gone and follows_from_abort(error):
            return Failed()
        self._causes.note(error)
        # What is raised after the abort cannot be distinguished from what the abort causes: it is
        # recorded, and the rank is not blamed for it.
        return Failed(fault, error if gone or not interrupted else None)

    def _await_abort(self, failed: Failed) -> Finished | Failed:
        """Until the groups are aborted (by the monitor thread); ``detect`` and ``abort``."""
        deadline = _STORE_ANSWERS_WITHIN + 2 * self._settings.hard_timeout
        try:
            message = self._inbox.next(deadline)
        except queue.Empty:
            error = TimeoutError(f"the abort did not end within {deadline}")
            error.__cause__ = failed.error
            self._leave(error, self._fault(error, FaultKind.FINALIZE, gone=True))
        if isinstance(message, Completed):
            return self._fail_late(failed)
        self._note_abort(message)
        return failed

    def _fail_late(self, failed: Failed) -> Finished:
        """A reserve failed after all active ranks had finished: the outcome stays."""
        if failed.fault is not None and failed.fault.gone and failed.error is not None:
            self._page.finished = 1
            self._end_rank(failed.error, None)
        log.warning("a reserve failed after the job had finished: %s", failed.fault)
        return Finished(None)

    def _await_outcome(self, value: Any) -> Finished | Failed:
        """This rank is done: wait for the others, on an active rank for ``completion_timeout``."""
        active = self._state.mode is Mode.ACTIVE
        timeout = self._settings.completion_timeout
        at_first = min(timeout, _GROUPS_OUTLIVE_FUNCTION)
        try:
            try:
                message = self._inbox.next(at_first if active else None)
            except queue.Empty:
                if self.done_with_groups:
                    close_gloo_connections()
                message = self._inbox.next(timeout - at_first)
        except queue.Empty:
            late = f"this rank finished, and others did not within {timeout}"
            fault = self._fault(TimeoutError(late), FaultKind.COMPLETION_TIMEOUT)
            self.session.ledger.record_fault(self._state.iteration, fault)
            message = self._inbox.next(_STORE_ANSWERS_WITHIN + self._settings.hard_timeout)
        if isinstance(message, Completed):
            return Finished(value)
        self._note_abort(message)
        return Failed()

    # --- the way to the next iteration --------------------------------------------------------

    def _restart(self, ending: Failed) -> None:
        """Finalize, health check, barrier, assign: then the next iteration can begin."""
        self._account.restarted(self._state)  # the last one, if the function was not reached
        if ending.fault is not None and ending.fault.gone:
            assert ending.error is not None
            self._leave(ending.error, ending.fault)
        self._recover(ending)
        agreed = self._pass_barrier()
        before = copy.copy(self._state)
        if agreed.agreement.returning:
            self._restart_with_returning(agreed, before)
            return
        with self._account.phase("assign"):
            self._assign(agreed)
        ledger, iteration = self.session.ledger, self._state.iteration
        self.unfinished = ledger.unfinished(iteration) if self._returned else None
        self._state.advance()
        if self._state.rank == 0:  # the one that writes the incident
            agreed = self._inbox.in_whole(agreed)
        self._account.restarting(agreed.agreement, before)
        self._enter_iteration(agreed)

    def _restart_with_returning(self, ended: Agreed, before: State) -> None:
        """The rest of a restart after which lost ranks are there again."""
        if not set(range(before.initial_rank)) - ended.agreement.gone:  # it writes the incident
            ended = self._inbox.in_whole(ended)
        self.unfinished = None
        with self._account.phase("grow"):
            joined = self._grow(ended)
        with self._account.phase("assign"):
            self._assign(joined)
        returned = ended.agreement.returning - joined.agreement.gone
        self._account.restarting(ended.agreement, before, returned)
        self._enter_iteration(joined)

    def _note_abort(self, message: MonitorMessage) -> None:
        if not isinstance(message, Aborted):
            raise InternalError(f"expected the abort, got {message}")
        with logged("looking at groups that are to be kept"):
            kept_beside.spare()  # what the function has begun since the abort looked
        assert self._connections is not None
        self._connections.connect_again()
        self._account.aborted(message.seen_at, message.collect_s, message.abort_s)

    def _recover(self, ending: Failed) -> None:
        """Finalize and health check, under the hard timeout; a failure ends this rank."""
        self._state.fn_exception = ending.error
        self._page.touch()
        self._page.watch = Watch.HARD
        kind = FaultKind.FINALIZE
        try:
            with self._account.phase("finalize"):
                place("finalize")
                self._callback(self._settings.finalize)
                self._release_iteration()
            kind = FaultKind.HEALTH_CHECK
            with self._account.phase("health_check"):
                place("restart_health_check")
                self._check_health(self._restart_health_check)
            if operations_are_open():
                raise self._beyond_restarts(
                    "left the script in the middle of a group of NCCL's operations"
                    " (batch_isend_irecv), which only the end of its process ends"
                )
            if self.session.interrupter.is_deaf:
                raise self._beyond_restarts(
                    "could not start a thread, after which this version of Python cannot interrupt"
                    " its main thread any more"
                )
        except BaseException as error:  # noqa: BLE001 - with any of them this rank cannot go on
            # One that decides not to go on did not end the iteration.
            decided = isinstance(error, RestartAbort)
            self._leave(error, self._fault(error, kind, gone=True, secondary=decided))
        finally:
            self._page.watch = Watch.NONE

    def _beyond_restarts(self, why: str) -> RestartAbort:
        reason = f"rank {self._state.initial_rank} {why}"
        escalation = Escalation("respawn", reason, passing=True)
        return RestartAbort(f"escalation to respawn: {reason}", escalation=escalation)

    def _release_iteration(self) -> None:
        """Let go of what the abandoned iteration holds."""
        workers = self.session.loader_workers
        workers.keep()
        release(all_behind(self._causes.last, self._caught))
        self._caught = None
        workers.end()
        end_checkpoint_process()

    def _pass_barrier(self) -> Agreed:
        """The barrier that all healthy ranks pass together."""
        with self._account.phase("barrier"):
            self._arrive(self._state.iteration)
            agreed = self._inbox.agreement(self._state.iteration)
        if self._state.initial_rank in agreed.agreement.gone:
            agreed = self._inbox.in_whole(agreed)
            reasons = [
                f for f in agreed.agreement.faults if f.initial_rank == self._state.initial_rank
            ]
            reason = reasons[-1].summary if reasons else "it was reported gone"
            error = RestartError(f"the other ranks restarted without this one: {reason}")
            self._end_rank(error, agreed)
        self._account.agreed(agreed.agreement.faults)
        return agreed

    def _arrive(self, iteration: int) -> None:
        session, state = self.session, self._state
        place("barrier")
        keys = session.assigner.keys(state, iteration)
        arrival = Arrival(state.initial_rank, state.rank, state.world_size, keys)
        session.ledger.arrive(iteration, arrival, session.gone)

    def _assign(self, agreed: Agreed) -> None:
        """This rank's numbers in the next iteration; a rank without a place leaves."""
        try:
            self.session.assigner.assign(self._state, agreed.agreement, agreed.placement)
        except BaseException as error:  # noqa: BLE001 - RankDiscarded, or a user's assignment
            kind = FaultKind.DISCARDED if isinstance(error, RankDiscarded) else FaultKind.LEFT
            fault = self._fault(error, kind, gone=True)
            following = self._state.iteration + (agreed.agreement.iteration != INITIAL)
            self.session.ledger.record_gone(following, fault, agreed.agreement.gone)
            self._end_rank(error, agreed)

    # --- the ways out -------------------------------------------------------------------------

    def _complete(self, value: Any) -> Any:
        """All ranks have finished."""
        self._page.finished = 1
        if self._grows:
            with logged("ending the job for those that would come back"):
                self.session.ledger.generations.end()
        if self._settings.completion is not None:
            with logged("the completion callback"):
                self._settings.completion(self._state.freeze())
        self._check_out()
        self._restore_env()
        return value

    def _leave(self, error: BaseException, fault: Fault) -> NoReturn:
        """Record that this rank leaves, wait with the others for the barrier, and leave."""
        self._causes.note(error)
        session, iteration = self.session, self._state.iteration
        agreed: Agreed | None = None
        with logged("leaving"):
            session.ledger.record_gone(iteration, fault, session.gone)
            self._page.finished = 1  # our exit is expected from now on: do not report it
            agreed = self._inbox.in_whole(self._inbox.agreement(iteration))
        self._end_rank(error, agreed)

    def _end_rank(self, error: BaseException, agreed: Agreed | None) -> NoReturn:
        """The last steps of a rank that leaves: incident, terminate callback, check-out."""
        self._causes.note(error)
        self._state.mode = Mode.TERMINATED
        if agreed is not None:
            self._page.finished = 1
        if agreed is not None and agreed.agreement.iteration != INITIAL:
            self._account.leaving(agreed.agreement, self._state)
        if self._settings.terminate is not None:
            try:
                self._settings.terminate(self._state.freeze())
            except BaseException as replacement:  # noqa: BLE001 - it replaces the original
                self._causes.note(replacement)
                error = replacement
        self._check_out()
        raise Leaving(error)

    def _report_unexpected_end(self, error: BaseException) -> None:
        """An exception in no phase of the loop: the other ranks must not wait for this one."""
        if self._page.finished or isinstance(error, StoreGone | NameSpaceUsed):
            return
        with logged("reporting the end of this rank"):
            fault, session = self._fault(error, FaultKind.LEFT, gone=True), self.session
            session.ledger.record_gone(session.iteration, fault, session.gone)
            self._page.finished = 1

    def _check_out(self) -> None:
        """Have the ranks that host the store leave last."""
        critical = self.session.critical_ranks
        if not critical:
            return
        gone = self.session.gone
        with logged("checking out"):
            if self._state.mode is not Mode.TERMINATED:
                self.session.ledger.check_out(self._state.initial_world_size - len(gone))
            if self._state.initial_rank in critical:
                self.session.ledger.wait_for_all_to_leave(self._settings.barrier_timeout)

    def _restore_env(self) -> None:
        """Leave numbers in the environment that a later call can start from, also on a reserve."""
        state = copy.copy(self._state)
        state.active_rank, state.active_world_size = state.rank, state.world_size
        state.set_distributed_vars()

    # --- small things -------------------------------------------------------------------------

    def _env_rendezvous(self) -> contextlib.AbstractContextManager[None]:
        if self._settings.env_rendezvous:
            return env_leads_to(self._store_for_user, self._group_is_made)
        return contextlib.nullcontext()

    # A later generation has another session.

    def _another_connection(self) -> StoreClient:
        return self.session.another_connection()

    def _store_for_user(self) -> Store:
        return self.session.store_for_user()

    def _group_is_made(self, ms: float) -> None:
        self.session.group_is_made()
        made = Regrouped(
            iteration=self.iteration,
            rung=Rung.ANEW,
            world_size=distributed.get_world_size(),
            ms=ms,
        )
        with self.session.interrupter.atomic():
            self._account.made_anew(made)

    def _fault(
        self, error: BaseException, kind: FaultKind, *, gone: bool = False, secondary: bool = False
    ) -> Fault:
        state = self._state
        return Fault.of_exception(
            error,
            kind,
            initial_rank=state.initial_rank,
            rank=state.rank,
            iteration=state.iteration,
            gone=gone,
            secondary=secondary,
        )

    def _callback(self, callback: Callable[..., Any] | None) -> None:
        if callback is not None:
            callback(self._state.freeze())

    def _check_health(self, check: HealthCheck | None) -> None:
        try:
            self._callback(check)
        except HealthCheckError:
            raise
        except Exception as error:
            raise HealthCheckError(f"health check failed: {error}") from error
