"""``Wrapper`` makes a function restart in place; ``CallWrapper`` is its view from inside."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import re
import time
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
from torch import distributed

from ncclops.restart._page import Page, Watch
from ncclops.restart.compose import Compose
from ncclops.restart.environment_notes import environment_notes
from ncclops.restart.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    HealthCheck,
)
from ncclops.restart.log import set_up_logging
from ncclops.restart.loop import RestartLoop
from ncclops.restart.param_utils import bind_injected, parameters_of_type
from ncclops.restart.rank_assignment import RankAssignment
from ncclops.restart.rank_filter import with_rank_filter
from ncclops.restart.settings import Settings
from ncclops.restart.state import State

log = logging.getLogger("ncclops.restart")

P = ParamSpec("P")
T = TypeVar("T")


class Wrapper:
    """Decorator: run a distributed function, and restart it in the same processes after a fault.

    When a rank raises, hangs, dies or becomes unhealthy, all healthy ranks leave the function,
    the process groups are aborted, ranks are assigned anew, and the function starts again with
    the same arguments on all of them. See ``docs/restart.md``. All parameters are keywords:

    - ``store_factory``, ``store_kwargs``: the store is ``store_factory(**store_kwargs)``, a
      subclass of ``store.StoreMixin``; default ``store.TCPStore()``.
    - ``initialize``, ``health_check``: called at the start of each iteration, in this order.
    - ``abort``: called in the monitor thread after a fault; default ``AbortTorchDistributed()``.
    - ``finalize``, then ``health_check`` again: called after the function was left.
    - ``rank_assignment``: who is who in the next iteration; default all ranks, gaps closed.
    - ``completion``, ``terminate``: called once when all ranks have finished, or when this rank
      leaves with an exception.
    - ``soft_timeout`` (60 s) without progress: a fault, all ranks restart. ``hard_timeout``
      (90 s): the process is ended (SIGTERM, SIGKILL ``termination_grace_time``, 5 s, later).
    - ``barrier_timeout`` (120 s): for a rank that is waited for between iterations;
      ``completion_timeout`` (120 s): for one that has not finished when another has.
    - ``heartbeat_interval`` (1 s), ``heartbeat_timeout`` (30 s): between the guardians.
    - ``monitor_process_interval`` (1 s): how often the guardian measures progress;
      ``progress_watchdog_interval`` (1 s): how often progress is recorded for it;
      ``monitor_thread_interval`` (1 s): the longest pause before an interruption that the
      function has swallowed is repeated. None of them delays the detection of a fault.
    - ``last_call_wait`` (0): wait that long before the abort, for other ranks' faults to be
      recorded. The barrier gathers them anyway, hence no wait by default.
    - ``monitor_process_logfile``, ``monitor_process_pidfile``: of the guardian; absolute paths,
      ``{rank}`` stands for the initial rank.
    - ``on_incident``: called with an ``Incident`` on every rank after each restart, and on a rank
      that leaves. ``incident_dir``: where one rank writes it as ``<n>/incident.json``, and every
      rank its picture before the abort (``docs/forensics.md``); ``n`` counts on over calls.
    - ``env_rendezvous`` (True): inside the function, ``init_process_group()`` with ``env://``
      uses the wrapper's store, which outlives rank 0.
    - ``enabled`` (True): ``False`` returns functions as they are.

    Raises ``TypeError`` and ``ValueError`` on parameters that are wrong or do not go together.
    """

    restart_health_check: HealthCheck | None

    def __init__(
        self,
        *,
        enabled: bool = True,
        rank_filter: RankAssignment | None = None,
        **parameters: Any,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled must be bool, not {type(enabled).__name__}: {enabled!r}")
        self.enabled = enabled
        _refuse_unknown(parameters)
        settings = Settings(**parameters)
        if rank_filter is not None:
            assignment = with_rank_filter(settings.rank_assignment, rank_filter)
            settings = dataclasses.replace(settings, rank_assignment=assignment)
        self.settings = settings
        self.restart_health_check = _restart_health_check(settings.health_check)

    def __getattr__(self, name: str) -> Any:
        """A parameter, by its name."""
        settings = self.__dict__.get("settings")
        if settings is not None and name in _PARAMETERS:
            return getattr(settings, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, fn: Callable[P, T]) -> Callable[P, T | None]:
        """``fn``, restarting. Returns its value, or ``None`` on a rank that was in reserve.

        Each call of the result stands by itself. It raises what this rank leaves with, and
        ``ValueError`` when ``torch.distributed`` is initialised already: groups have to be
        created inside the function.
        """
        if not self.enabled:
            return fn
        injected = parameters_of_type(fn, CallWrapper)

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | None:
            with CallWrapper(self) as call:
                return call._run(bind_injected(fn, injected, call, args, kwargs))  # type: ignore[no-any-return]

        return wrapped


_PARAMETERS = tuple(field.name for field in dataclasses.fields(Settings))


def _signature() -> inspect.Signature:
    own = list(inspect.signature(Wrapper.__init__).parameters.values())[:-1]  # without **parameters
    return inspect.Signature([*own, *inspect.signature(Settings).parameters.values()])


Wrapper.__init__.__signature__ = _signature()  # type: ignore[attr-defined]


def _refuse_unknown(parameters: dict[str, Any]) -> None:
    unknown = sorted(parameters.keys() - set(_PARAMETERS))
    if unknown:
        raise TypeError(f"Wrapper has no parameter {', '.join(unknown)}")


def _restart_health_check(check: HealthCheck | None) -> HealthCheck | None:
    """The user's check and then those of this rank's devices; ``None`` without ``LOCAL_RANK``."""
    if "LOCAL_RANK" not in os.environ:
        return None
    devices = (ChainedNicHealthCheck(), ChainedNVLHealthCheck(), ChainedGPUHealthCheck())
    composed: Any = Compose(*devices, *([check] if check is not None else []))
    health_check: HealthCheck = composed
    return health_check


class CallWrapper:
    """One call of a wrapped function, handed to a parameter that is annotated with this type."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._loop: RestartLoop | None = None
        self._phases: list[tuple[float, float]] = []

    def __enter__(self) -> CallWrapper:
        if distributed.is_available() and distributed.is_initialized():
            raise ValueError(
                "torch.distributed is initialised before the wrapped function was entered: "
                "call init_process_group() inside the function, which has to be able to do it again"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.shutdown()

    def _run(self, call: Callable[[], Any]) -> Any:
        settings = self._wrapper.settings
        state = State.from_env()
        set_up_logging(state.initial_rank)
        if state.initial_rank == 0:
            _warn_once()
        check = self._wrapper.restart_health_check or settings.health_check
        self._loop = RestartLoop(settings, state, call, check)
        return self._loop.run()

    @property
    def iteration(self) -> int:
        """The restart iteration, 0 at first."""
        return self._loop.iteration if self._loop is not None else 0

    def ping(self) -> None:
        """Report progress. The first ping in an iteration arms the timeouts for the next one.

        Costs well under a microsecond: it writes the time to memory.
        """
        self._page.ping = time.monotonic()

    def request_restart(self, reason: str, hung: int | None = None) -> None:
        """Have all ranks restart, for ``reason``. From any thread; returns at once.

        ``hung`` is the initial rank that is to blame, where somebody who sees all ranks has found
        one that hangs; otherwise the restart counts as requested by this rank.
        """
        self._session.request_restart(reason, hung)

    def beat(self) -> None:
        """Report progress like the automatic heartbeat, from any thread: nothing is armed.

        For what trains outside the main thread, which then only waits and would look stuck.
        """
        self._page.main_beat = time.monotonic()

    @property
    def is_guarded(self) -> bool:
        """Whether this rank's guardian is there, or being replaced."""
        return self._session.guardian.pid is not None

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """A section that a restart does not cut: the termination waits for its end.

        Once the termination has begun, entering raises ``RankShouldRestart`` at once. Re-entrant.
        The hard timeout still applies.
        """
        if self._loop is None:
            raise RuntimeError("atomic() is for use inside the wrapped function")
        with self._loop.session.interrupter.atomic():
            yield

    # --- timeouts -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(
        self, name: str, *, soft_timeout: timedelta, hard_timeout: timedelta
    ) -> Iterator[None]:
        """A phase with its own timeouts on this rank, such as the compilation before step 1.

        The timeouts of before apply again when it ends, counted from then. Phases nest.
        Raises ``ValueError`` unless ``soft_timeout < hard_timeout``.
        """
        self.begin_phase(name, soft_timeout=soft_timeout, hard_timeout=hard_timeout)
        try:
            yield
        finally:
            self.end_phase()

    def begin_phase(self, name: str, *, soft_timeout: timedelta, hard_timeout: timedelta) -> None:
        """Like entering ``phase``. A phase ends with its iteration at the latest."""
        self._check_timeouts(soft_timeout, hard_timeout)
        page = self._page
        if not page.phase_soft_s:
            self._phases.clear()  # what an interrupted iteration has left behind
        self._phases.append((page.phase_soft_s, page.phase_hard_s))
        self._set_phase(soft_timeout.total_seconds(), hard_timeout.total_seconds())
        log.info("phase %s: timeouts %s and %s", name, soft_timeout, hard_timeout)

    def end_phase(self) -> None:
        """Like leaving ``phase``. Raises ``RuntimeError`` outside of any."""
        if not self._phases or not self._page.phase_soft_s:
            raise RuntimeError("end_phase() without begin_phase() in this iteration")
        self._set_phase(*self._phases.pop())

    def _set_phase(self, soft_s: float, hard_s: float) -> None:
        page = self._page
        self._restart_clocks()
        page.phase_soft_s, page.phase_hard_s = soft_s, hard_s

    def set_timeouts(self, *, soft_timeout: timedelta, hard_timeout: timedelta) -> None:
        """Change the timeouts of *all* ranks from now on; any one rank may call it.

        The change travels from guardian to guardian and arrives within milliseconds; it does not
        wait for that. It lasts until the next change. If several ranks change at the same time,
        the latest one by the wall clock stands. A phase keeps its own timeouts.
        Raises ``ValueError`` unless ``soft_timeout < hard_timeout < barrier_timeout``.
        """
        self._check_timeouts(soft_timeout, hard_timeout)
        barrier_timeout = self._wrapper.settings.barrier_timeout
        if not hard_timeout < barrier_timeout:
            raise ValueError(f"hard_timeout < barrier_timeout: {hard_timeout=}, {barrier_timeout=}")
        soft_s, hard_s = soft_timeout.total_seconds(), hard_timeout.total_seconds()
        stamp = time.time()
        self._page.change_timeouts(soft_s, hard_s, stamp)
        message = {"op": "timeouts", "soft_s": soft_s, "hard_s": hard_s, "stamp": stamp}
        self._session.guardian.send(message)

    @staticmethod
    def _check_timeouts(soft_timeout: timedelta, hard_timeout: timedelta) -> None:
        if not timedelta(0) < soft_timeout < hard_timeout:
            raise ValueError(f"0 < soft_timeout < hard_timeout: {soft_timeout=}, {hard_timeout=}")

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """No timeouts inside, and fresh ones afterwards. Exceptions and deaths still restart."""
        self._disable_hang_protection()
        try:
            yield
        finally:
            self._enable_hang_protection()

    def _disable_hang_protection(self) -> None:
        self._page.watch = Watch.OFF

    def _enable_hang_protection(self) -> None:
        self._restart_clocks()
        self._page.watch = Watch.SOFT_AND_HARD

    def _restart_clocks(self) -> None:
        page = self._page
        armed = page.ping
        page.touch()
        if armed:
            page.ping = time.monotonic()

    # --- the rest -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Drop what the call held. The loop has released threads and guardian when it ended."""
        self._loop = None

    @property
    def _session(self) -> Any:
        if self._loop is None:
            raise RuntimeError("this is for use inside the wrapped function")
        return self._loop.session

    @property
    def _page(self) -> Page:
        page: Page = self._session.guardian.page
        return page


@functools.cache
def _warn_once() -> None:
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    numbers = (int(version[1]), int(version[2])) if version else (0, 0)
    for note in environment_notes(os.environ, numbers, torch.cuda.is_available()):
        log.warning("%s", note)
