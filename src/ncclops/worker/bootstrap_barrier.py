"""The barrier after ``init_process_group``: ends within its deadline and names who is missing."""

from __future__ import annotations

from datetime import timedelta

from ncclops.worker import store_barrier

_NAMED = 8  # most ranks in a message


class BootstrapTimeoutError(RuntimeError):
    """Not all ranks came up in time; the message names those that did not."""


def meet(limit: timedelta) -> None:
    """Wait until all ranks of the default group are here. Raises ``BootstrapTimeoutError``."""
    import torch.distributed as dist

    missing = store_barrier.meet("bootstrap", limit)
    if missing:
        raise BootstrapTimeoutError(
            f"bootstrap: waited {limit.total_seconds():.0f} s for ranks {_some(missing)} of"
            f" {dist.get_world_size()}; look at their logs first"
        )


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED]))
    return shown + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")
