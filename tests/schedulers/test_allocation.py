"""What a scheduler says of a job as a whole."""

from __future__ import annotations

import pytest

from ncclops.schedulers.allocation import Allocation, find_allocation


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, Allocation()),
        ({"SLURM_JOB_ID": "47"}, Allocation(job="slurm-47")),
        (
            {"SLURM_JOB_ID": "47", "SLURM_RESTART_COUNT": "1"},
            Allocation(job="slurm-47", requeued=True),
        ),
        ({"SLURM_RESTART_COUNT": "0"}, Allocation()),
        ({"SLURM_JOB_END_TIME": "1790000000"}, Allocation(ends=1790000000)),
        ({"SLURM_JOB_END_TIME": "Unknown"}, Allocation()),
        ({"SLURM_CPU_BIND": "quiet,none"}, Allocation()),
        (
            {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1"},
            Allocation(pinned_by=("SLURM_CPU_BIND", "quiet,mask_cpu:0x1")),
        ),
    ],
)
def test_slurm_s_variables_are_read_in_one_place(
    environ: dict[str, str], found: Allocation
) -> None:
    assert find_allocation(environ) == found
