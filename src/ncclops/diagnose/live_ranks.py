"""The ranks of a run, and which of them are alive on this machine."""

from __future__ import annotations

from pathlib import Path

from ncclops.capture.run_snapshots import is_running
from ncclops.record import snapshot_server_record
from ncclops.record.paths import RunPaths


def live_ranks(run: Path) -> list[int]:
    """Those whose worker is alive on this machine."""
    paths = RunPaths(run)
    servers = {
        rank: snapshot_server_record.read(paths.rank(rank).snapshot_server)
        for rank in paths.rank_numbers()
    }
    return [rank for rank, server in servers.items() if server is not None and is_running(server)]
