"""Has this rank's snapshot taken when an iteration fails, before the groups are aborted."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ncclops.capture import snapshot_server
from ncclops.capture.rank_snapshot import RankSnapshot
from ncclops.record import incidents as layout

if TYPE_CHECKING:
    from ncclops.restart.monitor_process import MonitorProcess

log = logging.getLogger("ncclops.restart")

# A worker of `launch` is told where its run's files are.
_RUN_DIR = "NCCLOPS_RUN_DIR"
# What a snapshot may cost a restart at most; as a rule it is milliseconds.
_TAKE_WITHIN_S = 2.0
# Whatever can wait does so until the ranks are at work again, or have to wait for each other
# anyway; not for longer, as this rank may be about to be ended.
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


class Collector:
    """One per call of a wrapped function; ``incidents`` is the directory they are written below.

    Raises ``OSError`` where the system has no means for the witness.
    """

    def __init__(self, incidents: Path, rank: int, guardian: MonitorProcess) -> None:
        self._incidents = incidents
        self._guardian = guardian
        run = os.environ.get(_RUN_DIR)
        self._witness = snapshot_server.start(rank, Path(run) if run else None)
        self._first = 0
        self._unfinished: queue.SimpleQueue[_Unfinished | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        # There from the start: a script whose threads are counted at each restart has no new one.
        self._finisher = threading.Thread(target=self._finish, name="ncclops-picture", daemon=True)
        self._finisher.start()
        # What the main thread left the function with, if it has: its stack there is of interest.
        self.left_by: BaseException | None = None
        contact, page = self._witness.contact, guardian.page
        page.witness_tid, page.witness_signal = contact.tid, contact.signal
        page.witness_stacks_fd, page.main_thread = contact.stacks_fd, contact.main_thread

    def free_number(self) -> int:
        """A number that no incident has yet. Ranks may see different ones and have to agree."""
        return layout.next_number(self._incidents)

    def number_from(self, first: int) -> None:
        """The incident that ends iteration 0 is ``first``, as agreed by all ranks."""
        self._first = first
        self._guardian.page.incidents_from = first + 1

    def directory(self, iteration: int) -> Path:
        """Of the incident that ends ``iteration``."""
        return self._incidents / str(self._first + iteration)

    def begin(self) -> None:
        """An iteration begins: what the recorder holds from before belongs to another one."""
        self._witness.since_ns = time.time_ns()
        self.left_by = None

    def collect(self, iteration: int) -> float:
        """Take the snapshot, have it finished in the background; the seconds that it took.

        The guardian adds its view at the same time. Called in the monitor thread.
        """
        started = time.monotonic()
        self._guardian.send({"op": "observe", "iteration": iteration})
        snapshot = RankSnapshot(self._witness.who, self._witness.since_ns)
        snapshot.left_by = self.left_by
        gpu = threading.Thread(target=snapshot.read_gpu, name="ncclops-gpu", daemon=True)
        gpu.start()
        snapshot.take_before_abort(_TAKE_WITHIN_S)
        directory = layout.rank_dir(self.directory(iteration), self._witness.who.rank)
        self._unfinished.put(_Unfinished(snapshot, directory, gpu, started + _REST_AFTER_S))
        return time.monotonic() - started

    def close(self, limit_s: float) -> None:
        """Have what is unfinished finished at once, and wait for that."""
        self._closing.set()
        self._unfinished.put(None)
        self._finisher.join(limit_s)

    def _finish(self) -> None:
        while (next_one := self._unfinished.get()) is not None:
            # The recorder announces to nobody that it has got on, and is asked.
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
        snapshot.failures.append((f"NVML did not answer within {_TAKE_WITHIN_S:g} s", [layout.GPU]))
    snapshot.write(unfinished.directory)
