"""The files of a rank's snapshot, in the directory of an incident or of ``ncclops stacks``.

<run>/incidents/<n>/rank<r>/flight.json    the flight recorder; where there are several,
                                           NCCL's, and the others' in FLIGHTS
<run>/incidents/<n>/rank<r>/stacks.txt     Python stacks of all threads
<run>/incidents/<n>/rank<r>/left.json      the exception by which the main thread had left the
                                           script, if it had: its stack is of where that was raised
<run>/incidents/<n>/rank<r>/native.txt     native stacks, by py-spy
<run>/incidents/<n>/rank<r>/groups.json    the process groups
<run>/incidents/<n>/rank<r>/process.json   the process from outside
<run>/incidents/<n>/rank<r>/gpu.json       NVML's view
<run>/incidents/<n>/rank<r>/logs.json      how long the rank's logs were, in bytes
<run>/incidents/<n>/rank<r>/missing.json   what the rank could not give, and why
<run>/where/<n>/rank<r>/                   the same, of a job that went on
"""

from __future__ import annotations

from pathlib import Path

from ncclops.record.documents import read_document, write_document, write_whole
from ncclops.record.paths import numbered

FLIGHT, FLIGHT_NCCL2, FLIGHT_GLOO = "flight.json", "flight-nccl2.json", "flight-gloo.json"
FLIGHTS = (FLIGHT, FLIGHT_NCCL2, FLIGHT_GLOO)
STACKS, LEFT, NATIVE = "stacks.txt", "left.json", "native.txt"
GROUPS, PROCESS, GPU = "groups.json", "process.json", "gpu.json"
LOGS, MISSING = "logs.json", "missing.json"

# What a complete snapshot holds at least; whatever of it is not there, missing.json explains.
COMPLETE = (FLIGHT, STACKS, GROUPS, PROCESS, GPU)


def rank_dir(snapshots: Path, rank: int) -> Path:
    """Where the snapshot of ``rank`` (initial) is, below an incident's or a look's directory."""
    return snapshots / f"rank{rank}"


def next_number(parent: Path) -> int:
    """A number that nothing in ``parent`` has yet."""
    return max(numbered(parent), default=-1) + 1


def ranks_in(snapshots: Path) -> list[int]:
    """The ranks of which there is a snapshot, or at least a directory."""
    names = [path.name.removeprefix("rank") for path in snapshots.glob("rank*")]
    return sorted(int(name) for name in names if name.isdecimal())


def write_stacks(directory: Path, text: str, left_by: str | None = None) -> None:
    """Write a rank's stacks, in place of earlier ones. Raises ``OSError``.

    ``left_by`` is the exception (type and text) by which the main thread had left the script: the
    stack shown for it is then of where that was raised, and not of where it stood.
    """
    # A script's name may be no UTF-8.
    write_whole(directory / STACKS, text.encode(errors="backslashreplace"))
    if left_by is not None:
        write_document(directory / LEFT, {"exception": left_by})
    else:
        (directory / LEFT).unlink(missing_ok=True)


def left_by(directory: Path) -> str | None:
    """What ``write_stacks`` was given with the stacks; None in runs of older versions."""
    exception = read_document(directory / LEFT).get("exception")
    return exception if isinstance(exception, str) else None


def add_missing(
    directory: Path,
    reason: str,
    files: list[str],
    *,
    silent: bool = False,
    ended: bool = False,
    ended_well: bool = False,
    ended_signal: str | None = None,
    ended_for: str | None = None,
) -> None:
    """Record why ``files`` of a rank's snapshot are missing; several callers may add reasons.

    ``silent``: the rank lived and did not answer; ``ended``: its process has ended, ``ended_well``:
    with exit code 0, or by ``ended_signal`` (its name, such as ``SIGKILL``), ``ended_for``:
    why its monitor process has ended it. ``reason`` is for people.
    """
    path = directory / MISSING
    before = read_document(path)  # or whatever the script has put there
    said, listed = before.get("reason"), before.get("files")
    reasons = [said] if isinstance(said, str) and said else []
    if reason not in reasons:
        reasons.append(reason)
    known = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    known += files
    facts = {"silent": silent, "ended": ended, "ended_well": ended_well}
    write_document(
        path,
        {
            "reason": "; ".join(reasons),
            "files": list(dict.fromkeys(known)),
            **{name: bool(value or before.get(name)) for name, value in facts.items()},
            "ended_signal": ended_signal or before.get("ended_signal"),
            "ended_for": ended_for or before.get("ended_for"),
        },
    )
