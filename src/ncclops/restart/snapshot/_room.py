"""How much memory of the host snapshots may take: what is beyond that ends processes, no call."""

from __future__ import annotations

import os
from pathlib import Path

from ncclops.host.memory_cgroup import memory_cgroups
from ncclops.restart.snapshot._errors import NoRoom


def available_bytes(root: Path = Path("/")) -> int:
    """What the host can still give, and the memory cgroups of this process allow."""
    import psutil

    limited = [left for each in memory_cgroups(root) if (left := each.left()) is not None]
    return max(0, min([psutil.virtual_memory().available, *limited]))


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
