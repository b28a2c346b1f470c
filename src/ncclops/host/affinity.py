"""Notices when the workers would share too few CPUs, because this process was pinned."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# What pins a step of Slurm's, or hands an outer step's pinning on to an inner `srun`.
_SLURM_BIND = "SLURM_CPU_BIND"
_PINNING = ("map", "mask", "rank", "ldom")


def remark(
    workers: int, allowed: Collection[int], present: int, environ: Mapping[str, str]
) -> str | None:
    """The remark for a process that may use ``allowed`` of ``present`` CPUs; None if all is well.

    Less than one CPU a worker stops training for data loading and NCCL's own threads; under Slurm
    that is what a task gets without ``--cpus-per-task``.
    """
    bind = environ.get(_SLURM_BIND, "")
    pinned = bind if any(word in bind for word in _PINNING) else ""
    too_few = len(allowed) < min(workers, present)
    if not too_few and not (pinned and len(allowed) < present):
        return None
    cpus = f"{len(allowed)} of {present} CPUs for {workers} worker{'s' * (workers != 1)}"
    if pinned:
        return (
            f"pinned to {cpus} by {_SLURM_BIND}={pinned}; where that comes from an outer step,"
            f" unset {_SLURM_BIND} before srun, or give srun --cpu-bind=none"
        )
    return f"pinned to {cpus}: under Slurm give --cpus-per-task, elsewhere look at taskset"
