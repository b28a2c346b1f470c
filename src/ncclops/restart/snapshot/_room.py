"""How much memory of the host snapshots may take: what is beyond that ends processes, no call."""

from __future__ import annotations

import os
from pathlib import Path

from ncclops.restart.snapshot._errors import NoRoom


def available_bytes(root: Path = Path("/")) -> int:
    """What the host can still give, and the control groups of this process (version 2) allow.

    Of their use, pages of files that nobody has open for long are not counted: the kernel takes
    those back.
    """
    import psutil

    left = [psutil.virtual_memory().available]
    top = root / "sys/fs/cgroup"
    own = _own_group(root)
    for group in (top / own, *(top / parent for parent in own.parents)):
        limit = _number(group / "memory.max")
        used = _number(group / "memory.current")
        if limit is not None and used is not None:
            left.append(limit - used + _inactive_files(group))
    return max(0, min(left))


def local_ranks() -> int:
    """How many ranks share the host with this one, itself included."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(told) if told.isdecimal() else 1)


def check(nbytes: int, available: int, ranks: int) -> None:
    """Raise ``NoRoom`` where ``nbytes`` for each rank of the host are more than are ``available``.

    All of them take theirs after the same step.
    """
    if nbytes * ranks > available:
        raise NoRoom(
            f"it takes {nbytes / 2**30:.3g} GiB of memory for each of the {ranks} ranks of"
            f" this host, which has {available / 2**30:.3g} left: give the job more, or keep less"
        )


def _own_group(root: Path) -> Path:
    """Of this process, below the top; the top itself in a container."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return Path()
    return Path(next((line[4:] for line in lines if line.startswith("0::/")), ""))


def _number(file: Path) -> int | None:
    """None where there is none, as ``max`` is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _inactive_files(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
