"""``CallWrapper``: what a wrapped function may ask of the restart core while it runs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import resource
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from ncclops.restart._monitor.link import Page, Watch
from ncclops.restart._observer import observed
from ncclops.restart.environment_notes import environment_notes
from ncclops.restart.health_check import HealthCheck
from ncclops.restart.keep_going import KeepGoing, OnMembership
from ncclops.restart.log import set_up_logging
from ncclops.restart.loop import RestartLoop
from ncclops.restart.regroup import Regrouped
from ncclops.restart.session import Session
from ncclops.restart.settings import Settings
from ncclops.restart.state import State
from ncclops.restart.store import TCPStore

log = logging.getLogger("ncclops.restart")

T = TypeVar("T")


class CallWrapper:
    """One call of a wrapped function, handed to a parameter that is annotated with this type."""

    def __init__(self, name: str, settings: Settings, restart_health_check: HealthCheck) -> None:
        self._name = name
        self._settings = observed(settings)
        self._restart_health_check = restart_health_check
        self._loop: RestartLoop | None = None
        self._going: KeepGoing | None = None
        self._phases: list[tuple[float, float]] = []

    def __enter__(self) -> CallWrapper:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{self._name}() is wrapped for restarts and was called in thread "
                f"{threading.current_thread().name!r}: call it in the main thread, the only one "
                "that can be interrupted when another rank fails"
            )
        if distributed.is_available() and distributed.is_initialized():
            raise ValueError(
                "torch.distributed is initialised before the wrapped function was entered: "
                "call init_process_group() inside the function, which has to be able to do it "
                "again; groups that an earlier call has left open end by destroy_process_group()"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.shutdown()

    def run(self, call: Callable[[], T]) -> T | None:
        """Run ``call`` until it has ended well on all ranks. Once; for ``Wrapper``."""
        settings = self._settings
        state = State.from_env()
        set_up_logging(state.initial_rank)
        if state.initial_rank == 0:
            _warn_once(settings.hard_timeout, issubclass(settings.store_factory, TCPStore))
        self._loop = RestartLoop(settings, state, call, self._restart_health_check)
        value: T | None = self._loop.run()
        return value

    @property
    def iteration(self) -> int:
        """The restart iteration, 0 at first."""
        return self._loop.iteration if self._loop is not None else 0

    def ping(self) -> None:
        """Report progress. The first ping in an iteration arms the timeouts for the next one.

        Costs well under a microsecond: it writes the time to memory.
        """
        self._page.ping = self._page.now()

    def request_restart(self, reason: str, hung: int | None = None) -> None:
        """Have all ranks restart, for ``reason``. From any thread; returns at once.

        ``hung`` is the initial rank that hangs, where an observer of all ranks, such as the
        launcher, has found one; otherwise the restart counts as requested by this rank.
        """
        self._session.request_restart(reason, hung)

    def beat(self) -> None:
        """Report progress like the automatic heartbeat, from any thread: nothing is armed.

        For training outside the main thread, which then only waits and would look stuck.
        """
        self._page.main_beat = self._page.now()

    def done_with_groups(self) -> None:
        """Say, at the end of the function, that this rank uses its process groups no more.

        If other ranks have not returned 3 s after it has, its Gloo connections are closed, as at
        the end of a process: those that wait for it in a collective fail, instead of waiting.
        """
        if self._loop is not None:
            self._loop.done_with_groups = True

    def keep_going(self, function: Callable[[], T], on_membership: OnMembership) -> T:
        """``function()``, called again after a fault while the wrapped function stays where it is.

        For a training loop whose objects are to stay alive: those that the wrapped function has
        made before, such as the model and the optimizer. ``on_membership(old, new)`` is called
        before each call of ``function``, at first with ``None`` for ``old``: there the process
        groups are made, and what holds them. Both are left when a rank fails, as the wrapped
        function would be, and all that a restart calls is called; what an interrupted step has left
        half done is for ``on_membership`` to put right.

        A rank that a fault finds outside of ``function`` calls the wrapped function again, as does
        one in a new process: ``old`` is ``None`` there, and its objects are new. A rank that is in
        reserve afterwards leaves the wrapped function.

        Raises ``RuntimeError`` outside the wrapped function and inside of ``function``.
        """
        if self._loop is None:
            raise RuntimeError("keep_going() is for use inside the wrapped function")
        if self._going is None:
            self._going = KeepGoing(self._loop)
        return self._going.run(function, on_membership)

    def init_process_group(
        self,
        backend: str,
        *,
        timeout: timedelta | None = None,
        within: timedelta = timedelta(seconds=30),
        device_id: torch.device | None = None,
        shrink: bool = False,
        reconfigure: bool | None = None,
    ) -> Regrouped:
        """Bring torch's default group to the members there are, in ``on_membership``.

        In place of ``torch.distributed.init_process_group``, on all ranks. The first time, it makes
        the group. After a fault, where the group that is there can be reconfigured on every rank
        (torch 2.14 and newer, Gloo), it has its new members and connections afterwards, and is the
        same object. With ``reconfigure``, so it is with NCCL (torch 2.15 and newer, with
        ``device_id``), where a rank that has no group makes one that joins. With ``shrink``, where
        the ranks are those of before without some that were lost, a group of NCCL is made of the
        communicator that is there (torch's first engine, NCCL 2.28.7 and newer, with
        ``device_id``). Otherwise it is made anew, on all ranks; ``why`` of the result says what was
        in the way. ``objects_stay`` says, on all ranks alike, that no rank is new: then DDP goes
        on, on any of these groups, after ``renew(ddp)`` of the result.

        ``timeout`` is the group's, by default torch's, and ``device_id`` its device, as torch has
        it; ``within`` is how long to reconfigure or shrink it may take, before the group is made
        anew instead. ``reconfigure=False``: a group of Gloo is made anew, too.

        Raises ``RuntimeError`` outside ``on_membership``, ``ValueError`` where a group of NCCL is
        to be shrunk and to be reconfigured, and what torch raises.
        """
        return self._in_on_membership("init_process_group").regroup(
            backend,
            timeout=timeout,
            within=within,
            device_id=device_id,
            shrink=shrink,
            reconfigure=reconfigure,
        )

    def new_group(
        self,
        ranks: Sequence[int],
        backend: str,
        *,
        timeout: timedelta | None = None,
        device_id: torch.device | None = None,
        group_desc: str = "",
    ) -> Any:
        """A group of ``ranks``, in ``on_membership``, once the default group is made.

        In place of ``torch.distributed.new_group``, on all ranks of the default group, for the same
        groups in the same order; ``ranks`` are its ranks. After a fault, a group of Gloo or NCCL
        that has these members, of which no operation was under way on any of them, is kept: the
        object of before, with its connections. Otherwise it is made anew. A group that is not asked
        for any more is ended when ``on_membership`` returns.

        ``group_desc`` tells apart groups of the same members; ``timeout`` and ``device_id`` are of
        a group that is made, as torch has them. Returns the group; on other ranks what torch
        returns there. Raises ``ValueError`` for ranks that are not there or come twice,
        ``RuntimeError`` outside ``on_membership``, and what torch raises.
        """
        going = self._in_on_membership("new_group")
        return going.new_group(ranks, backend, timeout, device_id, group_desc)

    def init_device_mesh(
        self,
        device_type: str,
        mesh_shape: Sequence[int],
        *,
        mesh_dim_names: Sequence[str],
        backend: str | None = None,
        timeout: timedelta | None = None,
        device_id: torch.device | None = None,
    ) -> Any:
        """A ``DeviceMesh`` of all ranks, in ``on_membership``, once the default group is made.

        In place of ``torch.distributed.init_device_mesh``, on all ranks; the product of
        ``mesh_shape`` is their number. Its groups are those of ``new_group``, each kept or made
        anew by itself; one of all ranks is the default group. ``backend`` is by default torch's for
        ``device_type``; ``timeout`` and ``device_id`` are as in ``new_group``. The mesh is a new
        object each time: what holds one of before (DTensors, FSDP) is made anew.

        Raises ``ValueError`` for a shape or names that do not fit, ``RuntimeError`` outside
        ``on_membership``, and what torch raises.
        """
        given = mesh_dim_names, backend, timeout, device_id
        going = self._in_on_membership("init_device_mesh")
        return going.init_device_mesh(device_type, mesh_shape, *given)

    def _in_on_membership(self, method: str) -> KeepGoing:
        if self._going is None or not self._going.is_in_on_membership:
            raise RuntimeError(f"{method}() is for use in on_membership, of keep_going()")
        return self._going

    @property
    def unfinished(self) -> frozenset[int] | None:
        """The initial ranks that had not returned from the function in the last iteration, if all
        that run it now had, this one among them; ``None`` otherwise.

        Empty: a rank was lost when the work was done everywhere.
        """
        return None if self._loop is None else self._loop.unfinished

    @property
    def main_thread_moved_at(self) -> float:
        """When the main thread was last known to execute Python, by ``time.monotonic``."""
        return self._page.main_beat

    @property
    def is_monitored(self) -> bool:
        """Whether this rank has a monitor process, or one is being started."""
        return self._session.monitor_process.pid is not None

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """A section that no restart interrupts: the restart waits until it ends.

        Once a restart has begun, entering raises ``RankShouldRestart`` at once. Re-entrant.
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
            self._phases.clear()  # what an interrupted iteration has left
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

        The change travels along the ring of monitor processes and arrives within milliseconds;
        this does not wait for that. It lasts until the next change. If several ranks change at
        the same time, that of the highest rank stands. A phase keeps its own timeouts.
        Raises ``ValueError`` unless ``soft_timeout < hard_timeout < barrier_timeout``.
        """
        self._check_timeouts(soft_timeout, hard_timeout)
        barrier_timeout = self._settings.barrier_timeout
        if not hard_timeout < barrier_timeout:
            raise ValueError(f"hard_timeout < barrier_timeout: {hard_timeout=}, {barrier_timeout=}")
        soft_s, hard_s = soft_timeout.total_seconds(), hard_timeout.total_seconds()
        stamp = self._page.next_stamp(self._session.initial_rank)
        self._page.change_timeouts(soft_s, hard_s, stamp)
        message = {"op": "timeouts", "soft_s": soft_s, "hard_s": hard_s, "stamp": stamp}
        self._session.monitor_process.send(message)

    @staticmethod
    def _check_timeouts(soft_timeout: timedelta, hard_timeout: timedelta) -> None:
        if not timedelta(0) < soft_timeout < hard_timeout:
            raise ValueError(f"0 < soft_timeout < hard_timeout: {soft_timeout=}, {hard_timeout=}")

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """No timeouts inside, and fresh ones afterwards. Exceptions and deaths still restart.

        Sections nest: timeouts count again from the end of the outermost one.
        """
        if self._page.watch == Watch.OFF:
            yield
            return
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
            page.ping = page.now()

    # --- the rest -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Drop what the call held. Threads and processes ended with the loop."""
        self._loop = self._going = None

    @property
    def _session(self) -> Session:
        if self._loop is None:
            raise RuntimeError("this is for use inside the wrapped function")
        return self._loop.session

    @property
    def _page(self) -> Page:
        page: Page = self._session.monitor_process.page
        return page


@functools.cache
def _warn_once(hard_timeout: timedelta, hosts_store: bool) -> None:
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    numbers = (int(version[1]), int(version[2])) if version else (0, 0)
    has_cuda = torch.cuda.is_available()
    has_nccl = has_cuda and distributed.is_nccl_available()
    notes = environment_notes(
        os.environ,
        numbers,
        has_cuda,
        nccl_version=torch.cuda.nccl.version() if has_nccl else None,
        nccl_timeout=distributed.constants.default_pg_nccl_timeout if has_nccl else None,
        hard_timeout=hard_timeout,
        most_open_files=_hard_limit_of_files() if hosts_store else None,
    )
    for note in notes:
        log.warning("%s", note)


def _hard_limit_of_files() -> int | None:
    """``None``: unlimited."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard
