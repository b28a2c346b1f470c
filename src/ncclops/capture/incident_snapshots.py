"""Takes this rank's snapshot when an iteration fails, before the groups are aborted."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ncclops.capture import snapshot_server
from ncclops.capture.rank_snapshot import RankSnapshot
from ncclops.record import snapshot_files
from ncclops.record.regular_file import is_there
from ncclops.restart.snapshots import OutsideViewSource

log = logging.getLogger("ncclops.restart")

# A worker of `launch` has its run directory in this variable.
_RUN_DIR = "NCCLOPS_RUN_DIR"
# What a snapshot may cost a restart at most; as a rule it is milliseconds.
_TAKE_WITHIN_S = 2.0
# What can wait is done after the restart, or while ranks wait for each other anyway; but not much
# later, as this rank may be about to be ended.
_REST_AFTER_S = 1.0
# In which a rank that does nothing but reduce four bytes records a few hundred operations.
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class _Unfinished:
    """A snapshot whose rest is to be taken and written, below ``directory``, once it is ``due``."""

    snapshot: RankSnapshot
    directory: Path
    gpu: threading.Thread
    due: float  # on the monotonic clock


class IncidentSnapshots:
    """The snapshots of one rank, see ``ncclops.restart.snapshots.RankSnapshots``.

    Raises ``OSError`` where the system has no means for the snapshot server.
    """

    def __init__(self, rank: int) -> None:
        run = os.environ.get(_RUN_DIR)
        self._server = snapshot_server.start(rank, Path(run) if run else None)
        self._unfinished: queue.SimpleQueue[_Unfinished | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        # There from the start: a script whose threads are counted at each restart has no new one.
        self._finisher = threading.Thread(target=self._finish, name="ncclops-snapshot", daemon=True)
        self._finisher.start()
        # What the main thread left the function with, if it has: its stack there is of interest.
        self._left_by: BaseException | None = None

    def outside_view(self) -> OutsideViewSource:
        """The observer, and how it reaches the snapshot server."""
        contact = self._server.contact
        names = ("tid", "signal", "stacks_fd", "main_thread")
        arguments = {name: getattr(contact, name) for name in names}
        return OutsideViewSource("ncclops.capture.outside_view:Observer", arguments)

    def iteration_begins(self) -> None:
        """Entries that the recorder holds from before belong to another iteration."""
        self._server.since_ns = time.time_ns()
        self._left_by = None

    def function_left(self, error: BaseException) -> None:
        """Keep ``error``: its traceback shows more than where the main thread waits from now on."""
        self._left_by = error

    def take(self, directory: Path) -> None:
        """Take the snapshot, and have it finished in the background."""
        started = time.monotonic()
        snapshot = RankSnapshot(self._server.who, self._server.since_ns)
        snapshot.left_by = self._left_by
        gpu = threading.Thread(target=snapshot.read_gpu, name="ncclops-gpu", daemon=True)
        gpu.start()
        snapshot.take_before_abort(_TAKE_WITHIN_S)
        rank_dir = snapshot_files.rank_dir(directory, self._server.who.rank)
        self._unfinished.put(_Unfinished(snapshot, rank_dir, gpu, started + _REST_AFTER_S))

    def record_lost(self, directory: Path, rank: int, reason: str) -> None:
        """Record why there is no snapshot of a rank whose node was lost."""
        rank_dir = snapshot_files.rank_dir(directory, rank)
        if not is_there(rank_dir):
            snapshot_files.add_missing(rank_dir, reason, list(snapshot_files.COMPLETE), ended=True)

    def close(self, timeout_s: float) -> None:
        """Finish unfinished snapshots at once, and wait for that."""
        self._closing.set()
        self._unfinished.put(None)
        self._finisher.join(timeout_s)

    def _finish(self) -> None:
        while (next_one := self._unfinished.get()) is not None:
            # The recorder raises no event when it has progressed, so it is polled.
            while not (next_one.snapshot.is_urgent or time.monotonic() > next_one.due):
                if self._closing.wait(_LOOK_EVERY_S):
                    break
            try:
                _write(next_one)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next one is written
                log.warning("the snapshot of this rank could not be written: %s", error)


def _write(unfinished: _Unfinished) -> None:
    snapshot, gpu = unfinished.snapshot, unfinished.gpu
    snapshot.take_rest(_TAKE_WITHIN_S)
    gpu.join(_TAKE_WITHIN_S)
    if gpu.is_alive():
        snapshot.failures.append(
            (f"NVML did not answer within {_TAKE_WITHIN_S:g} s", [snapshot_files.GPU])
        )
    snapshot.write(unfinished.directory)
