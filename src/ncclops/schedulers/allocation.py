"""The job as the scheduler describes it: its number, whether it was requeued, when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ncclops.moments import LATEST_S
from ncclops.whole_numbers import whole_number

# The words of SLURM_CPU_BIND that pin a task's processes to CPUs; "none" and "verbose" do not.
_PINNING = ("map", "mask", "rank", "ldom")


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """None where the scheduler does not say it, or where there is none.

    ``job`` names the job; the steps of one Slurm allocation share it. ``requeued``: this is not
    its first start. ``ends`` is when the scheduler ends it, in seconds since the epoch.
    ``pinned_by`` is the variable, with its value, that pins this process to some of the CPUs.
    """

    job: str | None = None
    requeued: bool = False
    ends: int | None = None
    pinned_by: tuple[str, str] | None = None


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """What the scheduler's variables in ``environ`` say. Slurm is the one that says any of it."""
    job, end = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_END_TIME", "")
    binding = environ.get("SLURM_CPU_BIND", "")
    pins = any(word in binding for word in _PINNING)
    return Allocation(
        job=f"slurm-{job}" if job else None,
        requeued=environ.get("SLURM_RESTART_COUNT", "0") != "0",
        ends=whole_number(end, int(LATEST_S)),
        pinned_by=("SLURM_CPU_BIND", binding) if pins else None,
    )
