"""What one call of a wrapped function has besides the function: threads, processes, connections.

The loop (``loop.py``) decides; the session carries out and is released when the call ends.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from traceback import format_stack, walk_stack
from types import FrameType
from typing import Any

from torch import distributed
from torch.distributed import Store

from ncclops.restart import _gloo_sockets
from ncclops.restart._interrupt import Interrupter, wake_signal
from ncclops.restart._planning import choose_assigner
from ncclops.restart.agreement import INITIAL, Agreement
from ncclops.restart.attribution import ExceededTimeout, Fault, FaultKind
from ncclops.restart.incident import IncidentDirectories, free_number
from ncclops.restart.ledger import Ledger
from ncclops.restart.log import logged
from ncclops.restart.monitor_process import MonitorProcess, MonitorProcessSettings, reachable_host
from ncclops.restart.monitor_thread import MonitorThread
from ncclops.restart.progress_watchdog import ProgressWatchdog
from ncclops.restart.settings import Settings
from ncclops.restart.snapshots import OutsideViewSource, RankSnapshots, registered
from ncclops.restart.state import State
from ncclops.restart.store import PrefixStore, another_connection

log = logging.getLogger("ncclops.restart")

# How many of the following ranks a monitor process knows in advance: once its main process is dead
# it cannot ask for more.
_KNOWN_SUCCESSORS = 3

# A snapshot that is not written by then is on a disk that hangs.
_FINISH_SNAPSHOTS_WITHIN_S = 5.0

# The calls of wrapped functions in this process, in their order, which all ranks share.
_calls = itertools.count()

_CAUSES = {
    "died": FaultKind.DIED,
    "lost": FaultKind.LOST,
    "soft-timeout": FaultKind.SOFT_TIMEOUT,
}


class Session:
    """The threads, the monitor process and the connections of one call of a wrapped function.

    ``state`` is the rank's, as the loop keeps it.

    Raises what the store factory raises, and ``OSError`` when no monitor process can be started.
    """

    def __init__(self, settings: Settings, state: State) -> None:
        self.settings = settings
        self._state = state
        self._rank = state.initial_rank
        self._world_size = state.initial_world_size
        self._main_thread = threading.get_ident()
        self._iteration = INITIAL  # what the reporter attributes reports to
        self._gone: frozenset[int] = frozenset()  # when the present iteration began
        self._reported: dict[int, Fault] = {}  # losses that no agreement has taken in yet
        self._addresses: list[list[Any]] = []
        with contextlib.ExitStack() as stack:
            stack.callback(_gloo_sockets.release_gloo_connections)
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
            self._own_sockets: set[int] = set()
            self._connecting = threading.Lock()
            self.store = self._connect()
            page.touch()  # connecting may have taken longer than a timeout
            # Not before the store answers: until then there is nothing that it could report to, and
            # the wait for a late rank 0 would count towards the hard timeout.
            self.monitor_process.start()
            self.assigner = choose_assigner(settings.rank_assignment, self.store)
            self.ledger = self._ledger(self.store)
            self.incidents = self._incident_directories()
            self.reporter = Reporter(lambda: self._ledger(self._another_connection()))
            stack.callback(self.reporter.stop, 5)
            self.watchdog = ProgressWatchdog(
                self.monitor_process,
                settings.progress_watchdog_interval,
                settings.heartbeat_timeout,
                self._on_monitor_message,
            )
            self.watchdog.start()
            stack.callback(self.watchdog.stop)
            self.interrupter = Interrupter(
                self._main_thread,
                settings.monitor_thread_interval.total_seconds(),
                settings.soft_timeout.total_seconds(),
            )
            self.monitor_thread = MonitorThread(
                self._ledger(self._another_connection()),
                self.interrupter,
                settings.abort,
                initial_rank=self._rank,
                last_call_wait=settings.last_call_wait,
                # the others may need their hard timeout before they come to the barrier
                agreement_timeout=settings.barrier_timeout + settings.hard_timeout,
                abort_timeout=settings.hard_timeout,
                wake=wake_signal(),
                unblock=self._unblock,
                take_snapshot=self._take_snapshot if self._snapshots is not None else None,
            )
            stack.callback(self.monitor_thread.stop, 1)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Stop the threads and the monitor process, and drop the connections."""
        self.monitor_process.page.finished = 1
        self._stack.close()
        # The connections close with the last reference, and the store's server goes when they do.
        del (
            self.store,
            self.raw_store,
            self.ledger,
            self.monitor_thread,
            self.reporter,
            self.assigner,
        )

    # --- connections --------------------------------------------------------------------------

    def _connect(self) -> Store:
        before = set(_gloo_sockets.socket_inodes().values())
        factory: Any = self.settings.store_factory
        self.raw_store: Store = factory(**(self.settings.store_kwargs or {}))
        self._own_sockets |= set(_gloo_sockets.socket_inodes().values()) - before
        self._prefix = f"{_job_prefix()}/call{next(_calls)}"
        return PrefixStore(self._prefix, self.raw_store)

    def _another_connection(self) -> Store:
        with self._connecting:  # the reporter does while the main thread is in the function
            before = set(_gloo_sockets.socket_inodes().values())
            store = another_connection(self.raw_store)
            self._own_sockets |= set(_gloo_sockets.socket_inodes().values()) - before
        return PrefixStore(self._prefix, store)

    def _incident_directories(self) -> IncidentDirectories | None:
        """Where incidents are written, if anywhere; all ranks number them alike."""
        if self.settings.incident_dir is None:
            return None
        parent = Path(self.settings.incident_dir)
        first = self.ledger.agree_on("incidents-from", free_number(parent))
        directories = IncidentDirectories(parent, first)
        self.monitor_process.page.incidents_from = directories.first + 1
        return directories

    def _ledger(self, store: Store) -> Ledger:
        return Ledger(store, self._world_size, self.assigner.planner)

    def store_for_user(self) -> Store:
        """A store for the process groups of the present iteration, over a connection of its own.

        Its connection is shut down when the iteration is aborted, which ends a wait on it.
        """
        with self._connecting:  # or it would be taken for our own, which are never shut down
            store = another_connection(self.raw_store)
        return PrefixStore(f"{self._prefix}/{self._iteration}/groups", store)

    def _unblock(self, frame: FrameType) -> None:
        """End the main thread's wait for a peer that will not come: on a store, or in Gloo."""
        ports = {port for store in _stores_in(frame) if (port := _port_of(store)) is not None}
        if isinstance(self.raw_store, distributed.TCPStore):
            ports.add(self.raw_store.port)
        for port in ports:
            _gloo_sockets.shut_down_connections_to(port, keep=self._own_sockets)
        _gloo_sockets.shut_down_gloo_connections()
        if _is_making_a_group(frame):
            _gloo_sockets.answer_gloo_rendezvous(self._world_size + 1)

    # --- iterations ---------------------------------------------------------------------------

    def connect_ring(self, timeout: timedelta) -> None:
        """Give our monitor process the address of its successor, once that is published."""
        if self._world_size == 1:
            self._send_addresses()
            return
        successor = (self._rank + 1) % self._world_size
        self._addresses.append(self.ledger.address_of(successor, timeout))
        self._send_addresses()

    def enter(self, iteration: int, agreement: Agreement) -> None:
        """The ranks have agreed on how the last iteration ended: ``iteration`` begins."""
        self._gone = agreement.gone
        page = self.monitor_process.page
        page.iteration, page.number = iteration, self._state.rank
        page.phase_soft_s = page.phase_hard_s = 0.0
        self._iteration = iteration
        if self._snapshots is not None:
            with logged("preparing snapshots"):
                self._snapshots.iteration_begins()
        # A loss that was reported too late for the agreement is a fault of the new iteration.
        for rank, fault in list(self._reported.items()):
            if rank not in agreement.gone:
                self.ledger.record_fault(iteration, fault)
                self.ledger.count_losses(iteration, agreement.gone)
            else:
                del self._reported[rank]

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
    def iteration(self) -> int:
        """The present iteration; ``INITIAL`` before the first."""
        return self._iteration

    @property
    def gone(self) -> frozenset[int]:
        """The initial ranks that had left the job when the present iteration began."""
        return self._gone

    def add_successors(self, gone: Iterable[int]) -> None:
        """Give it the addresses of a few more successors, now that all have published theirs."""
        lost = set(gone)
        following = [rank for rank in self._following(self._rank) if rank not in lost]
        more = self.ledger.known_addresses(following[1:_KNOWN_SUCCESSORS])
        self._addresses += more
        if more:  # an empty message would mean that no other rank is left
            self._send_addresses(more)

    def request_restart(self, reason: str, hung: int | None) -> None:
        """Put a fault of the present iteration on record, from any thread.

        Of this rank, or as ``hung`` of another one.
        """
        iteration = self._iteration
        fault = Fault(
            kind=FaultKind.REQUESTED if hung is None else FaultKind.HUNG,
            initial_rank=self._rank if hung is None else hung,
            rank=None,
            iteration=iteration,
            at=time.time(),
            summary=reason,
        )
        if iteration != INITIAL:  # before the first, there is nothing to start again
            self.reporter.submit(lambda ledger: ledger.record_fault(iteration, fault))

    # --- messages of the monitor process (watchdog thread) -------------------------------------

    def _on_monitor_message(self, message: dict[str, Any]) -> None:
        if message["op"] == "need-addresses":
            self._on_need_addresses(message["after"])
        else:
            self.reporter.submit(lambda ledger: self._record(ledger, message))

    def _record(self, ledger: Ledger, message: dict[str, Any]) -> None:
        """Put a monitor process's report into the store, and confirm that. Reporter thread."""
        iteration = self._iteration
        fault = Fault(
            kind=_CAUSES[message["cause"]],
            initial_rank=message["rank"],
            rank=message.get("number"),
            iteration=message.get("iteration", iteration),
            at=message["at"],
            summary=f"rank {message['rank']}: {message['detail']}",
            detail=message["detail"],
            timeout=ExceededTimeout(**timeout) if (timeout := message.get("timeout")) else None,
            traceback=message.get("stacks") or self._main_stack_if_silent(message),
            gone=message["gone"],
        )
        if fault.initial_rank in self._gone:
            pass  # a rank that has left already: it is in the last agreement
        elif fault.gone:
            self._reported[fault.initial_rank] = fault
            iteration = self._iteration  # read after the note for ``enter`` is made
            ledger.record_fault(iteration, fault)
            ledger.record_gone(iteration, fault, self._gone)
        elif fault.iteration == iteration:
            ledger.record_fault(iteration, fault)
        self.monitor_process.send({"op": "confirm", "id": message["id"]})

    def _main_stack_if_silent(self, message: dict[str, Any]) -> str | None:
        """Where this rank's main thread is, if ``message`` says that it does not move."""
        frame = sys._current_frames().get(self._main_thread)
        if message["rank"] != self._rank or message["cause"] != "soft-timeout" or frame is None:
            return None
        return "".join(["Main thread (most recent call last):\n", *format_stack(frame)])

    def _on_need_addresses(self, after: int) -> None:
        if after != self._rank:
            self.reporter.submit(lambda ledger: self._look_up(ledger, after))
        elif self._addresses:
            self._send_addresses()  # the monitor process is a replacement
        # else it has just started, and the main thread sends the first ones in a moment

    def _look_up(self, ledger: Ledger, after: int) -> None:
        following = itertools.islice(self._following(after), _KNOWN_SUCCESSORS)
        found = ledger.known_addresses(following)
        self._addresses += found
        self._send_addresses(found)

    def _following(self, rank: int) -> Iterable[int]:
        """The ranks after ``rank`` in the ring, up to our own."""
        for step in range(1, self._world_size):
            following = (rank + step) % self._world_size
            if following == self._rank:
                return
            yield following

    def _send_addresses(self, addresses: list[list[Any]] | None = None) -> None:
        chosen = self._addresses if addresses is None else addresses
        self.monitor_process.send({"op": "addresses", "addresses": chosen})


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
        logfile=with_rank(settings.monitor_process_logfile),
        pidfile=with_rank(settings.monitor_process_pidfile),
        incident_dir=settings.incident_dir,
        outside_view=outside_view,
    )


def _job_prefix() -> str:
    """The name space of this job and attempt in a store that others may use as well."""
    chosen = os.environ.get("NCCLOPS_STORE_PREFIX")
    if chosen:
        return chosen
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return "/".join(["ncclops", *(os.environ[name] for name in names if name in os.environ)])


def _is_making_a_group(frame: FrameType) -> bool:
    """Whether ``frame`` or one of its callers is torch's making of a process group."""
    return any(f.f_code.co_name == "_new_process_group_helper" for f, _ in walk_stack(frame))


def _stores_in(frame: FrameType) -> Iterable[Store]:
    """The stores among the local variables of ``frame`` and its callers."""
    for caller, _ in walk_stack(frame):
        for value in list(caller.f_locals.values()):
            if isinstance(value, Store):
                yield value


def _port_of(store: Any) -> int | None:
    """The port of the TCPStore at the bottom of ``store``."""
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, distributed.TCPStore) else None


Job = Callable[[Ledger], None]


class Reporter:
    """The reporter thread: writes to the store what must not wait for the main thread.

    Mostly deaths and timeouts that monitor processes report. The watchdog thread receives them
    and must not block, and the main and the monitor thread may be blocked in a wait of their own:
    hence a third thread with a third connection, made by ``connect``. Both exist from the first
    report on: a job without faults does not have them.
    """

    def __init__(self, connect: Callable[[], Ledger]) -> None:
        self._connect = connect
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def submit(self, job: Job) -> None:
        """Run ``job`` soon, after those before. Does not block; any thread."""
        self._jobs.put(job)
        with self._starting:
            if self._thread is None:
                target = self._run
                self._thread = threading.Thread(target=target, name="ncclops-reporter", daemon=True)
                self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Finish what is queued, for at most ``timeout_s``, and end."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        ledger: Ledger | None = None
        while (job := self._jobs.get()) is not None:
            try:
                ledger = ledger or self._connect()
                job(ledger)
            except Exception as error:  # noqa: BLE001 - the report goes to another main process
                log.warning("a report could not be recorded: %s", error)
                ledger = None
