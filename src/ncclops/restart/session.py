"""The threads, processes and connections of one call of a wrapped function.

The loop (``loop.py``) decides; the session carries that out, and is closed when the call ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed import Store

from ncclops.restart._assignment.planning import choose_assigner
from ncclops.restart._data_loaders import LoaderWorkers
from ncclops.restart._groups import gloo_sockets
from ncclops.restart._groups.backends import nccl_error
from ncclops.restart._groups.ending import wait_for_groups_to_end
from ncclops.restart._groups.recorder import begun_operations
from ncclops.restart._interrupt.main_thread import Interrupter, wake_signal
from ncclops.restart._monitor.client import MonitorClient
from ncclops.restart._monitor.link import Watch
from ncclops.restart._silence import LastOperation, own_silence
from ncclops.restart._store.addresses import reachable_host
from ncclops.restart._store.client import StoreClient
from ncclops.restart._store.connections import Connections
from ncclops.restart.agreement import INITIAL, Agreement
from ncclops.restart.attribution import Fault
from ncclops.restart.blocked import BlockedMainThread
from ncclops.restart.exception import NameSpaceUsed
from ncclops.restart.generations import Generation
from ncclops.restart.incident import IncidentDirectories, free_number
from ncclops.restart.ledger import Ledger
from ncclops.restart.log import logged
from ncclops.restart.monitor_process import MonitorProcess, MonitorProcessSettings
from ncclops.restart.monitor_thread import MonitorThread
from ncclops.restart.progress_watchdog import ProgressWatchdog
from ncclops.restart.raised import summarise
from ncclops.restart.settings import Settings
from ncclops.restart.snapshots import OutsideViewSource, RankSnapshots, registered
from ncclops.restart.state import State

log = logging.getLogger("ncclops.restart")

# What is to be recorded is small: after this long the store does not answer.
_RECORD_WITHIN_S = 5.0
# A snapshot that is not written by then goes to a disk that hangs.
_FINISH_SNAPSHOTS_WITHIN_S = 5.0
# The end of a group takes tens of milliseconds.
_END_GROUPS_WITHIN_S = 5.0


class Session:
    """The threads, the monitor process and the connections of one call of a wrapped function.

    ``state`` is the rank's, as the loop keeps it. Of a call that goes on in another ``generation``
    the connections stay: there is a session for each.

    Raises ``OSError`` when no monitor process can be started.
    """

    def __init__(
        self,
        settings: Settings,
        state: State,
        connections: Connections,
        generation: Generation,
    ) -> None:
        self.settings = settings
        self.generation = generation
        self._state = state
        self._rank = state.initial_rank
        self._world_size = state.initial_world_size
        self._main_thread = threading.get_ident()
        self._groups_made_in: int | None = None  # the iteration, with env://
        self._last_operation = LastOperation()
        self._nccl_error_in: int | None = None  # the iteration; once in each is enough
        self._aborted_in: int | None = None  # the latest iteration whose groups were aborted
        with contextlib.ExitStack() as stack:
            stack.callback(wait_for_groups_to_end, _END_GROUPS_WITHIN_S)
            stack.callback(gloo_sockets.release_gloo_connections)
            self.loader_workers = LoaderWorkers()
            stack.callback(self.loader_workers.end)
            self._snapshots, view = _start_snapshots(settings, self._rank)
            if self._snapshots is not None:
                stack.callback(_close_snapshots, self._snapshots)
            self.monitor_process = MonitorProcess(
                _monitor_process_settings(settings, self._rank, view)
            )
            stack.callback(self.monitor_process.stop)
            page = self.monitor_process.page
            page.iteration, page.number = INITIAL, state.rank
            page.touch()
            page.soft_s = settings.soft_timeout.total_seconds()
            page.hard_s = settings.hard_timeout.total_seconds()
            self._connections = connections
            self.monitor_process.start()
            self.assigner = choose_assigner(
                settings.rank_assignment, self._connections.for_assignment
            )
            self.ledger = self._ledger(self._connections.first)
            self.incidents = self._incident_directories()
            self._client = MonitorClient(
                self._rank,
                self._world_size,
                self._main_thread,
                self.monitor_process,
                lambda: self._ledger(self._connections.another()),
                self._look_again,
                lambda: self.monitor_thread.fault_seen_in,
                generation.absent,
            )
            stack.callback(self._client.stop, _RECORD_WITHIN_S)
            self.interrupter = Interrupter(
                self._main_thread,
                settings.monitor_thread_interval.total_seconds(),
                settings.soft_timeout.total_seconds(),
            )
            self.watchdog = ProgressWatchdog(
                self.monitor_process,
                settings.progress_watchdog_interval,
                settings.heartbeat_timeout,
                lambda: not self.interrupter.is_overdue,
                self._client.on_message,
                self._at_each_tick,
            )
            self.watchdog.start()
            stack.callback(self.watchdog.stop)
            self._blocked = BlockedMainThread(
                self._rank,
                self._main_thread,
                self.monitor_process,
                lambda: self.iteration,
                self._client.submit,
            )
            self.monitor_thread = MonitorThread(
                self._ledger(self._connections.another()),
                self.interrupter,
                settings.abort,
                initial_rank=self._rank,
                last_call_wait=settings.last_call_wait,
                # later than the main thread, which gives up: see Inbox._barrier_deadline
                agreement_timeout=2 * (settings.barrier_timeout + settings.hard_timeout)
                + settings.termination_grace_time,
                abort_timeout=settings.abort_within,
                wake=wake_signal(),
                unblock=self._end_wait,
                before_interrupting=self.loader_workers.keep,
                own_silence=self._own_silence,
                take_snapshot=self._take_snapshot if self._snapshots is not None else None,
                note_abort=self._note_abort,
            )
            stack.callback(self.monitor_thread.stop, 1)
            self._stack = stack.pop_all()

    def close(self, unrecorded: BaseException | None = None) -> None:
        """Stop the threads and the monitor process, and drop the connections.

        ``unrecorded``: this rank leaves because of that, and the store does not know. The monitor
        process stays until it has reported that to another rank.
        """
        if isinstance(unrecorded, NameSpaceUsed):
            self.monitor_process.page.finished = 1  # the others there are of another job
        if unrecorded is not None and not self.monitor_process.page.finished:
            self.monitor_process.leave_behind(summarise(unrecorded))
        self.monitor_process.page.finished = 1
        self._connections.close()
        # The function has ended: what a script that closes all descriptors has taken, it still has.
        with logged("closing what restarts need"):
            self._stack.close()
        # The connections close with the last reference, and the store's server goes when they do.
        del self._connections, self.ledger, self.monitor_thread, self.assigner

    def _incident_directories(self) -> IncidentDirectories | None:
        """Where incidents are written, if anywhere; all ranks number them alike."""
        if self.settings.incident_dir is None:
            return None
        parent = Path(self.settings.incident_dir)
        first = self.generation.incidents_from
        if first is None:
            first = self.ledger.agree_on("incidents-from", free_number(parent))
        directories = IncidentDirectories(parent, first)
        self.monitor_process.page.incidents_from = directories.first + 1
        return directories

    def _ledger(self, store: StoreClient) -> Ledger:
        limit = self.settings.grow_timeout
        waits = None if limit is None else limit > timedelta(0)
        size, planner = self._world_size, self.assigner.planner
        return Ledger(store, size, planner, self.generation, waits)

    def store_for_user(self) -> Store:
        """A store for the process groups of the present iteration."""
        self._groups_made_in = self.iteration
        return self._connections.for_groups(self.iteration)

    def name_for_kept_group(self) -> str:
        """The name space in the store, on all ranks the same, of a default group that is made in
        the present iteration and may outlive it."""
        return self._connections.name_for_kept_group(self.iteration)

    def store_for_kept_group(self, name: str) -> Store:
        """A store for the default group with that name space."""
        return self._connections.for_kept_group(name)

    def store_for_group_beside(self) -> tuple[Store, set[int]]:
        """A store for a group beside the default one that may outlive the present iteration, and
        the sockets of its connection."""
        return self._connections.for_group_beside(self.iteration)

    def store_for_shrinkable_group(self) -> Store:
        """A store for a default group of which another one may be made after the iteration."""
        return self._connections.for_shrinkable_group(self.iteration)

    def group_is_made(self) -> None:
        """The default group was made with the store that was handed out last."""
        self.monitor_process.page.group_made_in = self.iteration + 1
        self._connections.group_is_made()

    def another_connection(self) -> StoreClient:
        """To the store, in the name space of this call, for one thread."""
        return self._connections.another()

    def is_aborted(self, iteration: int) -> bool:
        """Whether the abort of the groups of ``iteration`` has begun. Any thread."""
        return self._aborted_in == iteration

    def _own_silence(self, waited_s: float | None) -> Fault | None:
        """Monitor thread."""
        judge = partial(
            own_silence,
            self.monitor_process.page,
            self._main_thread,
            self._rank,
            self._last_operation,
            waited_s,
            had_groups=self._groups_made_in == self.iteration,
        )
        if judge() is None:
            return None
        # The recorder is slow once there have been many groups. What has begun since the last tick
        # can only clear this rank.
        self._last_operation.look(begun_operations())
        return judge()

    def _at_each_tick(self) -> None:
        """Watchdog thread."""
        self._last_operation.look(begun_operations())
        iteration = self.iteration
        if self.monitor_process.page.watch != Watch.SOFT_AND_HARD:
            return
        if iteration in (self._nccl_error_in, self.monitor_thread.fault_seen_in):
            return
        if (error := nccl_error()) is not None:
            self._nccl_error_in = iteration
            self._client.report_nccl_error(error)

    def _note_abort(self, iteration: int, under_way: bool) -> None:
        """The abort of the groups begins, or has ended. Abort thread."""
        if iteration != self.iteration:  # it was given up, and ends when others are under way
            return
        page = self.monitor_process.page
        page.abort_began = page.now() if under_way else 0.0
        if under_way:
            self._aborted_in = self.iteration
        elif self.interrupter.armed:
            self._blocked.look(self.iteration)

    def _end_wait(self, frame: FrameType) -> None:
        self._connections.end_wait(frame, self._world_size)

    # --- iterations ---------------------------------------------------------------------------

    def enter(self, iteration: int, agreement: Agreement) -> None:
        """The ranks have agreed on how the last iteration ended: ``iteration`` begins."""
        self._connections.begin(iteration)
        page = self.monitor_process.page
        page.iteration, page.number = iteration, self._state.rank
        self._last_operation.iteration_begins()
        page.phase_soft_s = page.phase_hard_s = 0.0
        page.abort_began = page.blocked_since = 0.0
        if self._snapshots is not None:
            with logged("preparing snapshots"):
                self._snapshots.iteration_begins()
        self._client.begin(iteration, agreement, self.ledger)
        if iteration and self._state.rank == 0:
            self._client.clear_up(iteration)

    def function_left(self) -> None:
        """The main thread is out of the function. To be called by it."""
        self._blocked.has_moved()

    def note_function_left(self, error: BaseException) -> None:
        """The main thread has left the function with ``error``; the snapshot shows where."""
        if self._snapshots is not None:
            with logged("noting the exception for a snapshot"):
                self._snapshots.function_left(error)

    def _take_snapshot(self, iteration: int) -> None:
        """Monitor thread; the monitor process looks at the main process at the same time."""
        assert self._snapshots is not None and self.incidents is not None
        self.monitor_process.send({"op": "observe", "iteration": iteration})
        self._snapshots.take(self.incidents.of(iteration))

    def record_lost(self, directory: Path, rank: int, reason: str) -> None:
        """Have the snapshot hook note in the incident's directory that ``rank`` was lost."""
        if self._snapshots is not None:
            with logged("recording a lost rank"):
                self._snapshots.record_lost(directory, rank, reason)

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """The initial ranks that have to leave last, as the store says."""
        return self._connections.critical_ranks

    @property
    def initial_rank(self) -> int:
        """This rank's number when the call began."""
        return self._rank

    @property
    def iteration(self) -> int:
        """The present iteration; ``INITIAL`` before the first."""
        return self._client.iteration

    @property
    def gone(self) -> frozenset[int]:
        """The initial ranks that had left the job when the present iteration began."""
        return self._client.gone

    def connect_ring(self, timeout: timedelta) -> None:
        """See ``MonitorClient``."""
        self._client.connect_ring(self.ledger, timeout)

    def connect_ring_of(self, gone: Collection[int]) -> None:
        """See ``MonitorClient``."""
        self._client.connect_ring_of(self.ledger, gone)

    def add_successors(self, gone: Iterable[int]) -> None:
        """See ``MonitorClient``."""
        self._client.add_successors(self.ledger, gone)

    def _look_again(self, iteration: int) -> None:
        self.monitor_thread.look_again(iteration)

    def record_gone(self, fault: Fault) -> None:
        """See ``MonitorClient``. Main thread."""
        self._client.record_gone(self.ledger, fault)

    def ask_to_look_again(self) -> None:
        """See ``MonitorClient``."""
        self._client.ask_to_look_again()

    def request_restart(self, reason: str, hung: int | None) -> None:
        """See ``MonitorClient``."""
        self._client.request_restart(reason, hung)


def _start_snapshots(
    settings: Settings, rank: int
) -> tuple[RankSnapshots | None, OutsideViewSource | None]:
    """The hook that was handed in, where incidents are wanted, and its part outside."""
    factory = settings.snapshots or registered()
    if factory is None or settings.incident_dir is None:
        return None, None
    try:
        snapshots = factory(rank)
        return snapshots, snapshots.outside_view()
    except Exception as error:
        log.warning("incidents will have no snapshots: %s", error, exc_info=True)
        return None, None


def _close_snapshots(snapshots: RankSnapshots) -> None:
    with logged("finishing snapshots"):
        snapshots.close(_FINISH_SNAPSHOTS_WITHIN_S)


def _monitor_process_settings(
    settings: Settings, rank: int, outside_view: OutsideViewSource | None
) -> MonitorProcessSettings:
    def with_rank(path: str | None) -> str | None:
        return path.replace("{rank}", str(rank)) if path is not None else None

    return MonitorProcessSettings(
        rank=rank,
        host=reachable_host(),
        monitor_process_interval=settings.monitor_process_interval,
        heartbeat_interval=settings.heartbeat_interval,
        heartbeat_timeout=settings.heartbeat_timeout,
        termination_grace_time=settings.termination_grace_time,
        abort_timeout=settings.abort_within,
        logfile=with_rank(settings.monitor_process_logfile),
        pidfile=with_rank(settings.monitor_process_pidfile),
        incident_dir=settings.incident_dir,
        outside_view=outside_view,
    )
