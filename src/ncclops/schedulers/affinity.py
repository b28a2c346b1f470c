"""Notices when the workers would share too few CPUs, because this process was pinned."""

from __future__ import annotations

from collections.abc import Collection

from ncclops.schedulers.allocation import Allocation


def remark(
    workers: int, allowed: Collection[int], present: int, allocation: Allocation
) -> str | None:
    """The remark for a process that may use ``allowed`` of ``present`` CPUs; None if all is well.

    Less than one CPU a worker stops training for data loading and NCCL's own threads; under Slurm
    that is what a task gets without ``--cpus-per-task``.
    """
    pinned = allocation.pinned_by
    too_few = len(allowed) < min(workers, present)
    if not too_few and not (pinned and len(allowed) < present):
        return None
    cpus = f"{len(allowed)} of {present} CPUs for {workers} worker{'s' * (workers != 1)}"
    if pinned:
        name, value = pinned
        # An outer step's binding is passed on to an inner `srun`.
        return (
            f"pinned to {cpus} by {name}={value}; where that comes from an outer step,"
            f" unset {name} before srun, or give srun --cpu-bind=none"
        )
    return f"pinned to {cpus}: under Slurm give --cpus-per-task, elsewhere look at taskset"
