"""The barrier after ``init_process_group``: it ends within its deadline, and names who is missing.

Over the store and not over the group, because a collective on a group that does not come up says
neither; two store operations a rank.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

_PREFIX = "ncclops/bootstrap"
_NAMED = 8  # ranks in a message; of thousands, the first few tell enough


class BootstrapTimeoutError(RuntimeError):
    """Not all ranks came up in time; the message names those that did not."""


def meet(limit: timedelta) -> None:
    """Wait until all ranks of the default group are here. Raises ``BootstrapTimeoutError``."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store, rank, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    if store is None:  # MPI brings its own
        return
    where = f"{socket.gethostname()}, local rank {os.environ.get('LOCAL_RANK', '?')}"
    store.set(f"{_PREFIX}/{rank}", where)
    if store.add(f"{_PREFIX}/here", 1) == size:
        store.set(f"{_PREFIX}/complete", "1")
    try:
        store.wait([f"{_PREFIX}/complete"], limit)
    except RuntimeError as error:
        missing = [other for other in range(size) if not _is_here(store, other)]
        raise BootstrapTimeoutError(
            f"bootstrap: waited {limit.total_seconds():.0f} s for ranks {_some(missing)} of {size};"
            " look at their logs first"
        ) from error


def _is_here(store: Any, rank: int) -> bool:
    return bool(store.check([f"{_PREFIX}/{rank}"]))


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED]))
    return shown + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")
