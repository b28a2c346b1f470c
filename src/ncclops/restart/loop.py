"""The restart loop: a visible sequence of named phases.

::

    join ─► enter ─► run ─┬─ all done ─► complete
              ▲           │
              │           └─ fault ─► detect ─► abort ─► finalize ─► health check
              │                                                           │
              └───────────────────────────── assign ◄─────── barrier ◄────┘

``detect``, ``collect`` (this rank's picture, where incidents are wanted) and ``abort`` happen in
the monitor thread; this thread waits for them. Any phase may end with this rank *leaving*: it
says so in the ledger, and the others go on without it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch import distributed

from ncclops.restart._account import Account
from ncclops.restart._group_release import keep_backends_longer_than_groups
from ncclops.restart._monitor_link import Watch
from ncclops.restart._process import freeze_heap, release
from ncclops.restart.abort import forget_failed_groups
from ncclops.restart.agreement import INITIAL, Arrival
from ncclops.restart.attribution import Causes, Fault, FaultKind, comes_from_restart
from ncclops.restart.env_rendezvous import env_leads_to
from ncclops.restart.exception import (
    HealthCheckError,
    InternalError,
    RankShouldRestart,
    RestartAbort,
    RestartError,
    StoreGone,
    TimeoutError,  # noqa: A004 - the public API's name
)
from ncclops.restart.health_check import HealthCheck
from ncclops.restart.log import logged
from ncclops.restart.monitor_thread import Aborted, Agreed, Completed, News, StoreLost
from ncclops.restart.rank_assignment import RankDiscarded
from ncclops.restart.session import Session
from ncclops.restart.settings import Settings
from ncclops.restart.state import Mode, State
from ncclops.restart.store import BarrierTimeout, critical_ranks

log = logging.getLogger("ncclops.restart")

# Between a fault in the ledger and the news of it: two messages. This much later the store is ill.
_STORE_ANSWERS_WITHIN = timedelta(seconds=60)


@dataclass(frozen=True)
class Finished:
    """The iteration went well everywhere; ``value`` is what the function returned here."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The iteration is over; ``fault`` and ``error`` are this rank's own part in it, if any."""

    fault: Fault | None = None
    error: BaseException | None = None


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
        restart_health_check: HealthCheck | None,
    ) -> None:
        self._settings = settings
        self._restart_health_check = restart_health_check
        self._state = state
        self._call = call
        self.session = Session(settings, state)
        self._page = self.session.guardian.page
        session = self.session
        self._account = Account(session.incidents, settings.on_incident, session.record_lost)
        self._causes = Causes(state.initial_rank)

    @property
    def iteration(self) -> int:
        """The present iteration, from 0."""
        return self._state.iteration

    def run(self) -> Any:
        """The value of the function (``None`` on a reserve) once all ranks have finished.

        Raises what this rank leaves with; the exceptions of the function on the way there are
        chained to it.
        """
        try:
            with self._env_rendezvous():
                return self._run_iterations()
        except _Leaving as leaving:
            error: BaseException = leaving.error
        except distributed.DistNetworkError as failure:
            error = _store_gone(failure)
            error.__cause__ = failure
            self._causes.note(error)
        except BaseException as unexpected:  # noqa: BLE001 - Ctrl-C in a wait, whatever else
            error = unexpected
            self._causes.note(unexpected)
            self._depart_in_disorder(unexpected)
        finally:
            self.session.close()
        raise self._causes.behind(error)

    def _run_iterations(self) -> Any:
        self._join()
        while not isinstance(ending := self._iterate_for_sure(), Finished):
            self._restart(ending)
        return self._complete(ending.value)

    def _iterate_for_sure(self) -> Finished | Failed:
        """``_iterate``, even if the last of the exceptions on their way hits it at its very end."""
        try:
            return self._iterate()
        except RankShouldRestart:
            self.session.interrupter.settle()
            self._page.watch = Watch.NONE
            return self._await_abort(Failed())

    # --- join ---------------------------------------------------------------------------------

    def _join(self) -> None:
        """The barrier before the first iteration, and the first assignment."""
        session, timeout = self.session, self._settings.barrier_timeout
        session.monitor.expect_agreement(INITIAL)
        session.ledger.publish_address(self._state.initial_rank, session.guardian.address)
        self._arrive(INITIAL)
        keep_backends_longer_than_groups()
        freeze_heap()
        session.introduce(timeout)
        agreed = self._await_agreement(INITIAL)
        session.learn_successors(agreed.agreement.gone)
        self._assign(agreed)
        session.enter(0, agreed.agreement)

    # --- enter and run ------------------------------------------------------------------------

    def _iterate(self) -> Finished | Failed:
        """One iteration: the function on an active rank, waiting on a reserve."""
        state, session = self._state, self.session
        self._account.entering()
        state.set_distributed_vars()
        forget_failed_groups()
        value, caught = None, None
        try:
            try:
                value = self._run_armed()
            finally:
                session.interrupter.settle()
        except BaseException as error:  # noqa: BLE001 - sorted out below
            caught = error
        session.interrupter.settle()
        self._page.watch = Watch.NONE
        if caught is not None:
            session.note_exit(caught)
            return self._await_abort(self._sort_out(caught))
        if state.mode is Mode.ACTIVE:
            assert state.active_world_size is not None
            session.ledger.record_completion(state.iteration, state.active_world_size)
        return self._await_outcome(value)

    def _run_armed(self) -> Any:
        """The part that the monitor thread may interrupt."""
        interrupter = self.session.interrupter
        # Armed before anybody watches: an interruption must not find us on the way in.
        interrupter.arm()
        try:
            self.session.monitor.watch(self._state.iteration, self._state.freeze())
            self._page.touch()
            self._page.watch = Watch.SOFT_AND_HARD
            self._enter()
            if self._state.mode is Mode.ACTIVE:
                return self._call()
            return None
        finally:
            interrupter.armed = False  # first and without a call: see Interrupter

    def _enter(self) -> None:
        """Initialize and health check; then a restart has succeeded and is made known."""
        if not self._state.active_world_size:
            raise RestartAbort("the rank assignment leaves no active rank")
        self._callback(self._settings.initialize)
        self._check_health(self._settings.health_check)
        self._account.restarted(self._state)

    def _sort_out(self, error: BaseException) -> Failed:
        """What ``error``, which left the armed part, says about this rank."""
        state = self._state
        interrupted = self.session.monitor.fault_seen_in == state.iteration
        if interrupted and isinstance(error, RankShouldRestart) and error.__context__ is not None:
            error = error.__context__  # it came on top of what the function had raised itself
        if isinstance(error, RankShouldRestart):
            kind = None if interrupted else FaultKind.REQUESTED
        elif isinstance(error, Exception):
            kind = FaultKind.EXCEPTION
        else:
            kind = FaultKind.LEFT
        if kind is None:
            return Failed()
        gone = kind is FaultKind.LEFT
        fault = self._fault(error, kind, gone=gone, secondary=interrupted)
        if interrupted and not gone and (fault.is_symptom_by_text or comes_from_restart(error)):
            return Failed()  # what an abort does to those who wait
        self._causes.note(error)
        self.session.ledger.record_fault(state.iteration, fault)
        # What is raised after the abort cannot be told from what the abort made raise: it is on
        # record, and the rank is not blamed for it.
        return Failed(fault, error if gone or not interrupted else None)

    def _await_abort(self, failed: Failed) -> Finished | Failed:
        """Until the groups are aborted (by the monitor thread); ``detect`` and ``abort``."""
        deadline = _STORE_ANSWERS_WITHIN + 2 * self._settings.hard_timeout
        try:
            news = self._news(deadline)
        except queue.Empty:
            error = TimeoutError(f"the abort did not end within {deadline}")
            error.__cause__ = failed.error
            self._leave(error, self._fault(error, FaultKind.FINALIZE, gone=True))
        if isinstance(news, Completed):
            return self._fail_late(failed)
        self._note_abort(news)
        return failed

    def _fail_late(self, failed: Failed) -> Finished:
        """A reserve failed when the others had finished already: that changes nothing for them."""
        if failed.fault is not None and failed.fault.gone and failed.error is not None:
            self._depart(failed.error, None)
        log.warning("a reserve failed after the job had finished: %s", failed.fault)
        return Finished(None)

    def _await_outcome(self, value: Any) -> Finished | Failed:
        """This rank is done: wait for the others, on an active rank for ``completion_timeout``."""
        active = self._state.mode is Mode.ACTIVE
        timeout = self._settings.completion_timeout
        try:
            news = self._news(timeout if active else None)
        except queue.Empty:
            message = f"this rank finished, and others did not within {timeout}"
            fault = self._fault(TimeoutError(message), FaultKind.COMPLETION_TIMEOUT)
            self.session.ledger.record_fault(self._state.iteration, fault)
            news = self._news(_STORE_ANSWERS_WITHIN + self._settings.hard_timeout)
        if isinstance(news, Completed):
            return Finished(value)
        self._note_abort(news)
        return Failed()

    # --- the way to the next iteration --------------------------------------------------------

    def _restart(self, ending: Failed) -> None:
        """Finalize, health check, barrier, assign: then the next iteration can begin."""
        self._account.restarted(
            self._state
        )  # the last one, if the function was not even reached after it
        if ending.fault is not None and ending.fault.gone:
            assert ending.error is not None
            self._leave(ending.error, ending.fault)
        self._recover(ending)
        agreed = self._meet()
        before = copy.copy(self._state)
        with self._account.phase("assign"):
            self._assign(agreed)
        self._state.advance()
        self._account.restarting(agreed.agreement, before)
        self.session.enter(self._state.iteration, agreed.agreement)

    def _note_abort(self, news: News) -> None:
        if not isinstance(news, Aborted):
            raise InternalError(f"expected the abort, got {news}")
        self._account.aborted(news)

    def _recover(self, ending: Failed) -> None:
        """Finalize and health check, under the hard timeout; a failure ends this rank."""
        self._state.fn_exception = ending.error
        self._page.touch()
        self._page.watch = Watch.HARD
        kind = FaultKind.FINALIZE
        try:
            with self._account.phase("finalize"):
                self._callback(self._settings.finalize)
                release(self._causes.last)  # what is on record as a consequence, too
            kind = FaultKind.HEALTH_CHECK
            with self._account.phase("health_check"):
                self._check_health(self._restart_health_check)
        except BaseException as error:  # noqa: BLE001 - whatever it is, this rank cannot go on
            self._leave(error, self._fault(error, kind, gone=True))
        finally:
            self._page.watch = Watch.NONE

    def _meet(self) -> Agreed:
        """The barrier that all healthy ranks pass together."""
        with self._account.phase("barrier"):
            self._arrive(self._state.iteration)
            agreed = self._await_agreement(self._state.iteration)
        if self._state.initial_rank in agreed.agreement.gone:
            reasons = [
                f for f in agreed.agreement.faults if f.initial_rank == self._state.initial_rank
            ]
            reason = reasons[-1].summary if reasons else "it was reported gone"
            self._depart(RestartError(f"the others went on without this rank: {reason}"), agreed)
        self._account.agreed(agreed.agreement.faults)
        return agreed

    def _arrive(self, iteration: int) -> None:
        session, state = self.session, self._state
        keys = session.assigner.keys(state, iteration)
        arrival = Arrival(state.initial_rank, state.rank, state.world_size, keys)
        session.ledger.arrive(iteration, arrival, session.gone)

    def _await_agreement(self, iteration: int) -> Agreed:
        timeout = self._settings.barrier_timeout
        try:
            news = self._news(timeout)
        except queue.Empty:
            name = (
                "initial barrier" if iteration == INITIAL else f"barrier of iteration {iteration}"
            )
            raise BarrierTimeout(
                f"{name}: not all of the ranks arrived within barrier_timeout={timeout}, and "
                "nobody reported the missing ones lost"
            ) from None
        if not isinstance(news, Agreed):
            raise InternalError(f"expected the agreement, got {news}")
        self._causes.note_faults(news.agreement.faults)
        return news

    def _assign(self, agreed: Agreed) -> None:
        """This rank's numbers in the next iteration; a rank without a place leaves."""
        try:
            self.session.assigner.assign(self._state, agreed.agreement, agreed.placement)
        except BaseException as error:  # noqa: BLE001 - RankDiscarded, or a user's assignment
            kind = FaultKind.DISCARDED if isinstance(error, RankDiscarded) else FaultKind.LEFT
            fault = self._fault(error, kind, gone=True)
            following = self._state.iteration + (agreed.agreement.iteration != INITIAL)
            if kind is FaultKind.LEFT:
                self.session.ledger.record_fault(following, fault)
            self.session.ledger.record_gone(following, fault, agreed.agreement.gone)
            self._depart(error, agreed)

    # --- the ways out -------------------------------------------------------------------------

    def _complete(self, value: Any) -> Any:
        """All ranks have finished."""
        if self._settings.completion is not None:
            with logged("the completion callback"):
                self._settings.completion(self._state.freeze())
        self._check_out()
        self._restore_env()
        return value

    def _leave(self, error: BaseException, fault: Fault) -> NoReturn:
        """Tell the others that this rank is out, wait with them for the barrier, and go."""
        self._causes.note(error)
        session, iteration = self.session, self._state.iteration
        agreed: Agreed | None = None
        with logged("leaving"):
            session.ledger.record_fault(iteration, fault)
            session.ledger.record_gone(iteration, fault, session.gone)
            self._page.finished = 1  # from here on our end is no news
            agreed = self._await_agreement(iteration)
        self._depart(error, agreed)

    def _depart(self, error: BaseException, agreed: Agreed | None) -> NoReturn:
        """The last steps of a rank that leaves: the hook, the record."""
        self._causes.note(error)
        self._state.mode = Mode.TERMINATED
        if agreed is not None and agreed.agreement.iteration != INITIAL:
            self._account.leaving(agreed.agreement, self._state)
        if self._settings.terminate is not None:
            try:
                self._settings.terminate(self._state.freeze())
            except BaseException as replacement:  # noqa: BLE001 - it replaces the original
                self._causes.note(replacement)
                error = replacement
        self._check_out()
        raise _Leaving(error)

    def _depart_in_disorder(self, error: BaseException) -> None:
        """Something the loop has no phase for: the others must not wait for us."""
        if self._page.finished or isinstance(error, StoreGone):
            return
        with logged("reporting the end of this rank"):
            fault, session = self._fault(error, FaultKind.LEFT, gone=True), self.session
            session.ledger.record_fault(session.iteration, fault)
            session.ledger.record_gone(session.iteration, fault, session.gone)

    def _check_out(self) -> None:
        """Let ranks that hold the store leave last."""
        critical = critical_ranks(self.session.raw_store)
        if not critical:
            return
        gone = self.session.gone
        with logged("checking out"):
            if self._state.mode is not Mode.TERMINATED:
                self.session.ledger.check_out(self._state.initial_world_size - len(gone))
            if self._state.initial_rank in critical:
                self.session.ledger.wait_for_everyone(self._settings.barrier_timeout)

    def _restore_env(self) -> None:
        """Leave behind numbers that a later call can start from, reserves included."""
        everybody = copy.copy(self._state)
        everybody.active_rank, everybody.active_world_size = everybody.rank, everybody.world_size
        everybody.set_distributed_vars()

    # --- small things -------------------------------------------------------------------------

    def _env_rendezvous(self) -> contextlib.AbstractContextManager[None]:
        if self._settings.env_rendezvous:
            return env_leads_to(self.session.store_for_user)
        return contextlib.nullcontext()

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

    def _news(self, timeout: timedelta | None) -> News:
        """The next message of the monitor thread. Raises ``queue.Empty`` when it is late."""
        news = self.session.monitor.news.get(
            timeout=timeout.total_seconds() if timeout is not None else None
        )
        if isinstance(news, StoreLost):
            raise _store_gone(news.error) from news.error
        return news

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


class _Leaving(BaseException):
    """Unwinds the loop of a rank that has said goodbye; ``error`` is what its caller gets."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _store_gone(error: Exception) -> StoreGone:
    return StoreGone(f"the store does not answer any more: {error}")
