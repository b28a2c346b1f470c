"""The ranks of a run, and which of them are alive on this machine."""

from __future__ import annotations

from pathlib import Path

from ncclops.host import process_view
from ncclops.record import incidents


def ranks_of(run: Path) -> list[int]:
    """The initial ranks that have a directory in the run."""
    names = [path.name for path in (run / "ranks").glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


def live_ranks(run: Path) -> list[int]:
    """Those whose worker is alive on this machine."""
    contacts = {
        rank: incidents.read_json(incidents.witness_path(run, rank)) for rank in ranks_of(run)
    }
    return [
        rank
        for rank, contact in contacts.items()
        if contact and process_view.is_same_process(contact["pid"], contact["started_ticks"])
    ]
