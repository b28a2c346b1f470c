"""``Wrapper`` makes a distributed function restart in place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Final, Never, ParamSpec, TypeVar, cast, overload

from ncclops.restart.abort import Abort, AbortTorchDistributed
from ncclops.restart.call_wrapper import CallWrapper
from ncclops.restart.completion import Completion
from ncclops.restart.compose import Compose
from ncclops.restart.finalize import Finalize
from ncclops.restart.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    CudaContextCheck,
    HealthCheck,
)
from ncclops.restart.incident import Incident
from ncclops.restart.initialize import Initialize
from ncclops.restart.param_utils import bind_injected, parameters_of_type
from ncclops.restart.rank_assignment import ActivateAllRanks, RankAssignment, ShiftRanks
from ncclops.restart.rank_filter import with_rank_filter
from ncclops.restart.settings import Settings
from ncclops.restart.snapshots import SnapshotFactory
from ncclops.restart.store import StoreMixin, TCPStore
from ncclops.restart.terminate import Terminate

__all__ = ["CallWrapper", "Wrapper"]

P = ParamSpec("P")
T = TypeVar("T")

# Without state, so that all wrappers may share them.
_ABORT_ALL_GROUPS: Final[Abort] = AbortTorchDistributed()
_ALL_RANKS: Final = cast(RankAssignment, Compose(ActivateAllRanks(), ShiftRanks()))


class Wrapper:
    """Decorator: run a distributed function, and restart it in the same processes after a fault.

    When a rank raises, hangs, dies or becomes unhealthy, all healthy ranks leave the function,
    the process groups are aborted, ranks are assigned anew, and the function starts again with
    the same arguments on all of them. See ``docs/restart.md``.

    All parameters are keywords and hold for every call of the wrapped function; all ranks have to
    give the same values. Where nothing else is said, a default is that of NVIDIA's in-process
    wrapper, so that code written for it behaves alike.

    **The callbacks.** Each gets a ``FrozenState`` and returns it. ``Compose`` makes one of several.

    - ``initialize``: called at the start of each iteration, in the main thread. An exception is a
      fault like one of the function.
    - ``health_check``: called after ``initialize``, and again after ``finalize`` on the way to a
      restart, then followed by checks of this rank's GPU, NVLinks and NIC if ``LOCAL_RANK`` is
      set, and of its CUDA context if it has one. An exception on the way to a restart ends the
      rank.
    - ``abort``: called after a fault, in the monitor thread, while the main thread may still be in
      the function. The default aborts and destroys all process groups; ``None``: nothing is
      aborted, and what waits in a collective waits on.
    - ``finalize``: called after the function was left, in the main thread. An exception ends the
      rank.
    - ``completion``: called once when all ranks have finished; exceptions are logged.
    - ``terminate``: called once on a rank that leaves with an exception, which an exception of the
      callback replaces.
    - ``rank_assignment``: which rank has which number in the next iteration, and which ranks are
      active. The default keeps all healthy ranks active and closes the gaps. ``rank_filter`` is
      an older way to choose the active ranks, with a ``DeprecationWarning``.

    **The store** is ``store_factory(**store_kwargs)``, made anew in each call. ``store_factory``
    is a subclass of ``store.StoreMixin`` and of a ``torch.distributed.Store``.

    **Timeouts**, all ``datetime.timedelta``:

    - ``soft_timeout`` (60 s): a rank that shows no progress for so long is a fault, and all ranks
      restart, this one too.
    - ``hard_timeout`` (90 s): after so long its monitor process ends it: SIGTERM, and
      ``termination_grace_time`` (5 s) later SIGKILL.
    - ``abort_timeout`` (5 min, but never longer than ``hard_timeout``): after so long an abort is
      given up, and the function interrupted without it. A rank that this does not move is ended.
    - ``barrier_timeout`` (120 s): between iterations, how long a rank waits for the others. Longer
      than ``hard_timeout``, because a rank that hangs is waited for until it is ended.
    - ``completion_timeout`` (120 s): how long a rank that has finished waits for the others before
      that is a fault.
    - ``heartbeat_timeout`` (30 s): after so long without an answer from a rank's monitor process
      the rank is lost, which is how the loss of a whole host is noticed.
    - ``grow_timeout`` (``None``: never): lost ranks come back, as new processes that are started
      with ``NCCLOPS_RETURNING=1``, and the world is at its size again. For so long a restart waits
      for a rank that has just been lost; 0 s: the others go on without it, and restart once more
      when its new process is there. Shorter than ``barrier_timeout``. Not for a call inside
      another one.
    - ``last_call_wait`` (0 s; NVIDIA's: 1 s): pause between a fault and the abort, for faults of
      other ranks to be recorded. The barrier gathers them anyway.

    **Intervals**, all ``datetime.timedelta``. None of them delays the detection of an exception or
    of a death, which are events; a timeout is noticed later by up to the first two.

    - ``monitor_process_interval`` (1 s): how often the monitor process measures progress.
    - ``progress_watchdog_interval`` (1 s): how often the main process records its progress.
    - ``heartbeat_interval`` (1 s): between two heartbeats of neighbouring monitor processes.
    - ``monitor_thread_interval`` (1 s): the longest pause before an interruption that the function
      has swallowed is repeated.

    **Records**:

    - ``on_incident``: called with an ``Incident`` on every rank after each restart, and on a rank
      that leaves. Main thread; exceptions are logged.
    - ``incident_dir``: absolute path below which a rank of each host writes each incident, as
      ``<n>/incident.json``. ``n`` counts on over calls and attempts.
    - ``snapshots``: makes what adds snapshots of every rank to an incident, see
      ``restart.snapshots``; by default what was registered there, such as by
      ``ncclops.capture.install()``. Used only with ``incident_dir``.
    - ``monitor_process_logfile``, ``monitor_process_pidfile``: absolute paths; ``{rank}`` stands
      for the initial rank.

    **The rest**:

    - ``env_rendezvous`` (True): inside the function, ``init_process_group()`` with ``env://``
      uses the wrapper's store, which outlives rank 0.
    - ``enabled`` (True): ``False`` returns functions as they are.

    Raises ``TypeError`` on a value of a wrong type. Raises ``ValueError``, which names them all,
    on values that do not go together: ``soft_timeout < hard_timeout < barrier_timeout``; both
    heartbeats below ``barrier_timeout`` and the interval below the timeout; each other interval
    below ``soft_timeout``; paths that are not absolute; a torch without ``torch.distributed``.
    """

    restart_health_check: HealthCheck
    """What is checked on the way to a restart."""

    def __init__(
        self,
        *wrong: Never,
        store_factory: type[StoreMixin] = TCPStore,
        store_kwargs: dict[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = _ABORT_ALL_GROUPS,
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment = _ALL_RANKS,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
        soft_timeout: timedelta = timedelta(seconds=60),
        hard_timeout: timedelta = timedelta(seconds=90),
        abort_timeout: timedelta = timedelta(minutes=5),
        heartbeat_timeout: timedelta = timedelta(seconds=30),
        barrier_timeout: timedelta = timedelta(seconds=120),
        completion_timeout: timedelta = timedelta(seconds=120),
        grow_timeout: timedelta | None = None,
        last_call_wait: timedelta = timedelta(seconds=0),
        termination_grace_time: timedelta = timedelta(seconds=5),
        monitor_thread_interval: timedelta = timedelta(seconds=1),
        monitor_process_interval: timedelta = timedelta(seconds=1),
        heartbeat_interval: timedelta = timedelta(seconds=1),
        progress_watchdog_interval: timedelta = timedelta(seconds=1),
        monitor_process_logfile: str | None = None,
        monitor_process_pidfile: str | None = None,
        on_incident: Callable[[Incident], object] | None = None,
        incident_dir: str | None = None,
        snapshots: SnapshotFactory | None = None,
        env_rendezvous: bool = True,
        enabled: bool = True,
        rank_filter: RankAssignment | None = None,
    ) -> None:
        if wrong:
            raise TypeError(_without_brackets(type(self).__name__, wrong))
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled must be bool, not {type(enabled).__name__}: {enabled!r}")
        self.enabled = enabled
        settings = Settings(
            store_factory=store_factory,
            store_kwargs=store_kwargs,
            initialize=initialize,
            abort=abort,
            finalize=finalize,
            health_check=health_check,
            rank_assignment=rank_assignment,
            completion=completion,
            terminate=terminate,
            soft_timeout=soft_timeout,
            hard_timeout=hard_timeout,
            abort_timeout=abort_timeout,
            heartbeat_timeout=heartbeat_timeout,
            barrier_timeout=barrier_timeout,
            completion_timeout=completion_timeout,
            grow_timeout=grow_timeout,
            last_call_wait=last_call_wait,
            termination_grace_time=termination_grace_time,
            monitor_thread_interval=monitor_thread_interval,
            monitor_process_interval=monitor_process_interval,
            heartbeat_interval=heartbeat_interval,
            progress_watchdog_interval=progress_watchdog_interval,
            monitor_process_logfile=monitor_process_logfile,
            monitor_process_pidfile=monitor_process_pidfile,
            on_incident=on_incident,
            incident_dir=incident_dir,
            snapshots=snapshots,
            env_rendezvous=env_rendezvous,
        )
        if rank_filter is not None:
            assignment = with_rank_filter(settings.rank_assignment, rank_filter)
            settings = dataclasses.replace(settings, rank_assignment=assignment)
        self.settings = settings
        self.restart_health_check = _restart_health_check(settings.health_check)

    if not TYPE_CHECKING:  # type checkers know the parameters as those of ``settings``

        def __getattr__(self, name: str) -> Any:
            """A parameter, by its name."""
            settings = self.__dict__.get("settings")
            if settings is not None and name in _PARAMETERS:
                return getattr(settings, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @overload
    def __call__(self, fn: Callable[Concatenate[CallWrapper, P], T]) -> Callable[P, T | None]: ...

    @overload
    def __call__(self, fn: Callable[P, T]) -> Callable[P, T | None]: ...

    def __call__(self, fn: Callable[..., T]) -> Callable[..., T | None]:
        """``fn``, restarting. Returns its value, or ``None`` on a rank that was in reserve.

        A parameter of ``fn`` that is annotated with ``CallWrapper`` is filled in; the caller
        leaves it out. (Type checkers see that where it is the first one.) Each call of the
        result stands by itself. ``TypeError`` for arguments that ``fn`` does not take comes before
        anything is started. It raises what this rank leaves with; ``ValueError`` when
        ``torch.distributed`` is initialised already, as groups have to be created inside the
        function; ``RuntimeError`` outside the main thread.

        Raises ``TypeError`` when a call of ``fn`` would return before its body has run: for
        ``async def``, generator and asynchronous generator functions.
        """
        if not self.enabled:
            return fn
        _refuse_deferred(fn)
        injected = parameters_of_type(fn, CallWrapper)
        name = _name_of(fn)

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> T | None:
            with CallWrapper(name, self.settings, self.restart_health_check) as call:
                return call.run(bind_injected(fn, injected, call, args, kwargs))

        return wrapped


_PARAMETERS = tuple(field.name for field in dataclasses.fields(Settings))


def _without_brackets(name: str, given: tuple[object, ...]) -> str:
    """Why ``given`` without a keyword is refused: most often `@Wrapper` above a function."""
    if callable(given[0]):
        return f"{name} takes no function: write @{name}() above it, with brackets"
    return f"{name} takes keywords only: write the name of a parameter before {given[0]!r}"


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _refuse_deferred(fn: Callable[..., Any]) -> None:
    """Refuse functions whose call does nothing but return an object that runs the body later."""
    is_object = not (inspect.isroutine(fn) or isinstance(fn, functools.partial | type))
    body = type(fn).__call__ if is_object else fn
    if inspect.iscoroutinefunction(body):
        kind, remedy = "an async function", "wrap a function that calls asyncio.run()"
    elif inspect.isasyncgenfunction(body) or inspect.isgeneratorfunction(body):
        kind, remedy = "a generator function", "wrap a function that iterates over it"
    else:
        return
    raise TypeError(
        f"{_name_of(fn)} is {kind}: calling it runs nothing of its body, so that nothing could be "
        f"restarted; {remedy}"
    )


def _restart_health_check(check: HealthCheck | None) -> HealthCheck:
    """The user's check, then those of this rank's devices if ``LOCAL_RANK`` says which they are,
    then that of its CUDA context: what of the GPU itself is wrong says more.
    """
    checks: list[HealthCheck] = [CudaContextCheck()]
    if "LOCAL_RANK" in os.environ:
        checks += [ChainedNicHealthCheck(), ChainedNVLHealthCheck(), ChainedGPUHealthCheck()]
    composed: Any = Compose(*checks, *([check] if check is not None else []))
    health_check: HealthCheck = composed
    return health_check
