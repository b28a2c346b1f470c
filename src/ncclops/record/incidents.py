"""File names of snapshots and incidents, and how their files are written. Standard library only.

<run>/incidents/<n>/incident.json          why an iteration ended, and what the restart took
<run>/incidents/<n>/rank<r>/flight.json    the flight recorder; flight-gloo.json where NCCL has
                                           one of its own
<run>/incidents/<n>/rank<r>/stacks.txt     Python stacks of all threads
<run>/incidents/<n>/rank<r>/native.txt     native stacks, by py-spy
<run>/incidents/<n>/rank<r>/groups.json    the process groups
<run>/incidents/<n>/rank<r>/process.json   the process from outside
<run>/incidents/<n>/rank<r>/gpu.json       NVML's view
<run>/incidents/<n>/rank<r>/logs.json      how long the rank's logs were, in bytes
<run>/incidents/<n>/rank<r>/missing.json   what the rank could not give, and why
<run>/where/<n>/rank<r>/                   the same, of a job that went on
<run>/ranks/<r>/witness.json               how to reach the worker's witness
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

INCIDENTS, WHERE = "incidents", "where"
INCIDENT = "incident.json"
FLIGHT, FLIGHT_GLOO = "flight.json", "flight-gloo.json"
STACKS, NATIVE = "stacks.txt", "native.txt"
GROUPS, PROCESS, GPU = "groups.json", "process.json", "gpu.json"
LOGS, MISSING = "logs.json", "missing.json"
WITNESS = "witness.json"

# What a complete snapshot holds at least; whatever of it is not there, missing.json explains.
PICTURE = (FLIGHT, STACKS, GROUPS, PROCESS, GPU)


def rank_dir(snapshots: Path, rank: int) -> Path:
    """Where the snapshot of ``rank`` (initial) is, below an incident's or a look's directory."""
    return snapshots / f"rank{rank}"


def witness_path(run: Path, rank: int) -> Path:
    """How the worker of ``rank`` can be reached."""
    return run / "ranks" / str(rank) / WITNESS


def numbers(parent: Path) -> list[int]:
    """The incidents, or looks, in ``parent``, in order."""
    try:
        return sorted(int(entry) for entry in os.listdir(parent) if entry.isdecimal())  # noqa: PTH208
    except OSError:
        return []


def next_number(parent: Path) -> int:
    """A number that nothing in ``parent`` has yet."""
    return max(numbers(parent), default=-1) + 1


def ranks_in(snapshots: Path) -> list[int]:
    """The ranks of which there is a snapshot, or at least a directory."""
    names = [path.name.removeprefix("rank") for path in snapshots.glob("rank*")]
    return sorted(int(name) for name in names if name.isdecimal())


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    draft.write_bytes(data)
    draft.replace(path)


def write_json(path: Path, document: Any, indent: int | None = 1) -> None:
    """Write a JSON file whole or not at all."""
    write(path, json.dumps(document, indent=indent, default=str).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; an empty one if it is not there, or is none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def add_missing(directory: Path, reason: str, files: list[str]) -> None:
    """Say why ``files`` of a rank's snapshot are not there; several may have something to say."""
    path = directory / MISSING
    before = read_json(path)
    reasons = [before["reason"]] if before.get("reason") else []
    if reason not in reasons:
        reasons.append(reason)
    known = [*before.get("files", []), *files]
    write_json(path, {"reason": "; ".join(reasons), "files": list(dict.fromkeys(known))})


def read_list(path: Path) -> list[dict[str, Any]]:
    """The objects in the array in ``path``; none if it is not there, or is no array."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    return (
        [each for each in document if isinstance(each, dict)] if isinstance(document, list) else []
    )
