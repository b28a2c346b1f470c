"""When workers would share too few CPUs, and what is said of it."""

from __future__ import annotations

import pytest

from ncclops.schedulers.affinity import remark
from ncclops.schedulers.allocation import find_allocation

BOUND = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1"}
UNBOUND = {"SLURM_CPU_BIND": "none"}


@pytest.mark.parametrize(
    ("workers", "allowed", "present", "environ", "says"),
    [
        (8, 64, 64, {}, None),
        (8, 8, 64, {}, None),
        (8, 2, 2, {}, None),  # the machine has no more
        (8, 1, 64, {}, "pinned to 1 of 64 CPUs for 8 workers: under Slurm give --cpus-per-task"),
        (1, 0, 2, {}, "pinned to 0 of 2 CPUs for 1 worker: "),
        (8, 64, 64, BOUND, None),  # bound to all there are
        (8, 32, 64, UNBOUND, None),
        (8, 32, 64, BOUND, "pinned to 32 of 64 CPUs for 8 workers by SLURM_CPU_BIND=quiet,mask"),
        (8, 1, 64, BOUND, "give srun --cpu-bind=none"),
    ],
)
def test_fewer_cpus_than_workers_or_a_pinning_are_remarked(
    workers: int, allowed: int, present: int, environ: dict[str, str], says: str | None
) -> None:
    said = remark(workers, range(allowed), present, find_allocation(environ))
    assert said is None if says is None else says in str(said)
