"""All ranks of the default group meet, over the store and within a deadline.

Over the store and not over the group, because a collective on a group that does not come up, or
that some ranks never enter, names no rank; two store operations a rank.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from ncclops.host_name import host_name


def meet(where: str, limit: timedelta) -> list[int]:
    """Wait until all ranks have come to ``where``; those that had not within ``limit``."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store, rank, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    if store is None:  # MPI brings its own
        return []
    prefix = f"ncclops/{where}"
    store.set(f"{prefix}/{rank}", f"{host_name()}/{os.environ.get('LOCAL_RANK', '?')}")
    if store.add(f"{prefix}/here", 1) == size:
        store.set(f"{prefix}/complete", "1")
    try:
        store.wait([f"{prefix}/complete"], limit)
    except RuntimeError:
        return [other for other in range(size) if not _is_here(store, f"{prefix}/{other}")]
    return []


def _is_here(store: Any, key: str) -> bool:
    return bool(store.check([key]))
