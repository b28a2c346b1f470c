"""What torch keeps on record of process groups in Python: emptied, and its exception hooks.

Each ``init_process_group`` puts a hook in front of ``sys.excepthook`` which prefixes the output
of the one before with the rank: a traceback would have a prefix more after every restart, and
after a thousand the hooks would exceed the recursion limit.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from ncclops.restart._groups import kept_default

# What ``destroy_process_group`` empties, where it comes so far; each torch has most of them.
TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
    "pg_default_device",
    "pg_flight_recorder_hooks",
    "comms",
)


def empty_tables() -> None:
    world = getattr(distributed_c10d, "_world", None)
    if world is None:
        return
    default = kept_default.kept()
    kept = None if default is None else kept_default.Entries(default.group)
    if distributed.is_initialized():
        distributed_c10d._update_default_pg(None)
    for name in TABLES:
        table = getattr(world, name, None)
        if table is not None:
            table.clear()
    unregister = getattr(torch._C._distributed_c10d, "_unregister_all_process_groups", None)
    if unregister is not None:
        unregister()
    world.group_count = 0
    if kept is not None:
        kept.put_back()
        distributed_c10d._update_default_pg(kept.group)


def undo_excepthook_of_torch() -> None:
    """Take the hooks of the last iteration's groups away; one that a user has set stays."""
    hook = sys.excepthook
    while (before := _hook_before(hook)) is not None:
        hook = before
    sys.excepthook = hook


def _hook_before(hook: Any) -> Any:
    """The hook that was there before torch's; ``None`` if ``hook`` is not torch's."""
    if getattr(hook, "__name__", None) != "_distributed_excepthook":
        return None
    closure = inspect.getclosurevars(hook).nonlocals
    return closure.get("old_hook")
