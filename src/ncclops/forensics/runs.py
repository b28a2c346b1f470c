"""Finding the run that a command is about."""

from __future__ import annotations

from pathlib import Path

from ncclops.errors import UsageError
from ncclops.forensics import layout, proc

_PARENT = Path("runs")


def find_run(given: Path | None, *, live: bool) -> Path:
    """``given``, or the newest run below ``runs/`` (``live``: that is under way here).

    Raises ``UsageError`` when there is none.
    """
    if given is not None:
        if not (given / "run.json").exists() and not (given / layout.INCIDENTS).exists():
            raise UsageError(f"{given} is no run directory: run.json is not there")
        return given
    newest = sorted(_PARENT.glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest:
        if not live or live_ranks(path.parent):
            return path.parent
    wanted = "no run under way on this machine" if live else "no run"
    raise UsageError(f"{wanted} below {_PARENT}/: name the run directory")


def ranks_of(run: Path) -> list[int]:
    """The initial ranks that have a directory in the run."""
    names = [path.name for path in (run / "ranks").glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


def live_ranks(run: Path) -> list[int]:
    """Those whose worker is alive on this machine."""
    contacts = {rank: layout.read_json(layout.witness_path(run, rank)) for rank in ranks_of(run)}
    return [
        rank
        for rank, contact in contacts.items()
        if contact and proc.is_same_process(contact["pid"], contact["started_ticks"])
    ]
