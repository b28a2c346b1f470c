"""The ranks of a run, and which of them are alive on this machine."""

from __future__ import annotations

from pathlib import Path

from ncclops.host import process_view
from ncclops.record.documents import read_document
from ncclops.record.paths import RunPaths


def live_ranks(run: Path) -> list[int]:
    """Those whose worker is alive on this machine."""
    paths = RunPaths(run)
    contacts = {
        rank: read_document(paths.rank(rank).snapshot_server) for rank in paths.rank_numbers()
    }
    return [
        rank
        for rank, contact in contacts.items()
        if contact and process_view.is_same_process(contact["pid"], contact["started_ticks"])
    ]
