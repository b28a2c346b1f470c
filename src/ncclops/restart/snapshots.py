"""Hook for snapshots of a rank that are taken when an iteration fails. Standard library only.

The core itself writes ``incident.json``: why an iteration ended and what the restart took. What
else an incident should show of each rank (stacks, flight recorder, the process as the kernel sees
it) is taken by an implementation of the protocols below, which is handed in: with ``register`` for
all wrappers of the process, or with ``Wrapper(snapshots=...)`` for one. The one that comes with
ncclops is registered by ``ncclops.capture.install()``. It is used only where ``incident_dir`` is
set.

There are two parts, in two processes, because a rank that holds its GIL, is stopped or has died
cannot describe itself:

===================  ====================================  ========================================
part                 runs in                               made by
===================  ====================================  ========================================
``RankSnapshots``    the rank's main process               the factory that was registered
``OutsideView``      the rank's monitor process            an import path, see ``OutsideViewSource``
===================  ====================================  ========================================

An exception of either part is logged, and the restart goes on without the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class OutsideViewSource(NamedTuple):
    """How the monitor process makes its part.

    ``factory`` is ``module:name``; the module has to be found beside the package ``ncclops`` and
    may import the standard library only, as the monitor process has nothing else on its path. It
    is called as ``factory(rank, pid, **arguments)`` with the initial rank and the process id of
    the main process. ``arguments`` have to be representable in JSON.
    """

    factory: str
    arguments: Mapping[str, Any]


class RankSnapshots(Protocol):
    """A rank's snapshots of itself, one object for each call of a wrapped function."""

    def outside_view(self) -> OutsideViewSource | None:
        """The part in the monitor process; ``None``: there is none. Called once, in the main
        thread, before any other method."""

    def iteration_begins(self) -> None:
        """An iteration begins: what was recorded before belongs to another one. Main thread."""

    def function_left(self, error: BaseException) -> None:
        """The main thread has left the function with ``error``. Main thread."""

    def take(self, directory: Path) -> None:
        """Take a snapshot for the incident with this directory. The iteration has failed and
        nothing has been aborted yet: the restart waits until this returns, so what can be
        written later should be. Monitor thread; may run while ``function_left`` is called.
        """

    def record_lost(self, directory: Path, rank: int, reason: str) -> None:
        """``rank`` (initial) was lost, for ``reason``. Called on one of the ranks that go on, in
        its main thread, after it has written ``incident.json`` to ``directory``."""

    def close(self, timeout_s: float) -> None:
        """The call of the wrapped function ends: finish what is under way. Main thread."""


SnapshotFactory = Callable[[int], RankSnapshots]
"""Makes the snapshots of a rank, given its initial rank. Called in the main thread."""


class LastProgress(NamedTuple):
    """Seconds since the main process last showed that it runs, as its monitor process sees it.

    ``ping_s`` is ``None`` as long as the function has not called ``CallWrapper.ping``.
    """

    main_thread_s: float
    python_s: float
    ping_s: float | None


class OutsideView(Protocol):
    """The view of a main process from its monitor process, which has one thread.

    No method may block for longer than half a second: the monitor process has heartbeats to
    send. ``directory`` is that of the incident, ``None`` before the first iteration: then there
    is none.
    """

    def iteration_failed(self, directory: Path | None, progress: LastProgress) -> None:
        """The main process takes its own snapshot at this moment."""

    def main_silent(
        self, directory: Path | None, progress: LastProgress, reason: str
    ) -> str | None:
        """No Python thread runs in the main process. Called once in an iteration at most.

        Returns the Python stacks of all its threads, if they can be had without its help.
        """

    def main_ended(
        self,
        directory: Path | None,
        progress: LastProgress,
        reason: str,
        *,
        by_monitor: bool,
    ) -> None:
        """The main process has ended; its entry in ``/proc`` may still be there."""


_registered: SnapshotFactory | None = None


def register(factory: SnapshotFactory | None) -> None:
    """Use ``factory`` for all calls of wrapped functions that begin from now on; ``None``: none.

    The last registration counts. Any thread.
    """
    global _registered
    _registered = factory


def registered() -> SnapshotFactory | None:
    """What ``register`` was called with last."""
    return _registered
