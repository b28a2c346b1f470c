"""``ncclops stacks``: where each rank of a running job is, without stopping it."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from ncclops.capture.run_snapshots import Collected, Native, collect_run
from ncclops.diagnose import places
from ncclops.diagnose.live_ranks import live_ranks
from ncclops.diagnose.places import Cluster, RankView
from ncclops.errors import NcclopsError, UsageError
from ncclops.record import snapshot_files
from ncclops.record.paths import RunPaths


@dataclass(frozen=True)
class Look:
    """One look at a run: which ranks answered, and where all ranks are."""

    run: Path
    at: float
    collected: Collected
    views: tuple[RankView, ...]
    clusters: tuple[Cluster, ...]

    def to_json(self) -> dict[str, Any]:
        """``ncclops.where/1``."""
        return {
            "schema": "ncclops.where/1",
            "run": str(self.run),
            "at": self.at,
            "pictures": str(self.collected.directory),
            "answered": list(self.collected.answered),
            "silent": list(self.collected.silent),
            "missing": list(self.collected.missing),
            "clusters": [cluster.to_json() for cluster in self.clusters],
            "ranks": [_rank_json(view) for view in self.views],
        }


def look(run: Path, *, limit: timedelta, native: Native) -> Look:
    """Take snapshots of all ranks of the run, into ``<run>/where/<n>``, and say where they are.

    Where the run is another user's, they go into a directory for temporary files of our own: who
    owns the run directory decides where what is written there comes to lie. Raises ``UsageError``
    when no worker of it is alive on this machine, ``NcclopsError`` when the snapshots cannot be
    written.
    """
    if not live_ranks(run):
        raise UsageError(
            f"no worker of {run} is alive on this machine; for a run that has ended see"
            " `ncclops incident`, for another machine run this there"
        )
    parent = RunPaths(run).where
    at = time.time()
    try:
        ranks = RunPaths(run).rank_numbers()
        if not _is_ours(parent):
            parent = Path(tempfile.mkdtemp(prefix="ncclops-stacks-"))
        out = parent / str(snapshot_files.next_number(parent))
        collected = collect_run(run, ranks, out, limit, native=native)
    except OSError as error:
        why = f"cannot write the snapshots below {parent}: {error.strerror}"
        raise NcclopsError(why) from error
    views = tuple(places.read_rank(out, rank) for rank in ranks)
    return Look(run, at, collected, views, tuple(places.cluster(views)))


def _is_ours(parent: Path) -> bool:
    """Whether the run directory above ``parent`` is this user's, and ``parent`` no link."""
    if parent.parent.stat().st_uid != os.geteuid():
        return False
    try:
        found = parent.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _rank_json(view: RankView) -> dict[str, Any]:
    return {
        "rank": view.rank,
        "host": view.host,
        "pid": view.pid,
        "state": view.state,
        "place": view.place,
        "doing": view.doing,
        "frame": None if view.frame is None else view.frame.to_json(),
        "last_operation": msgspec.to_builtins(view.last),
        "reason": view.reason,
    }
