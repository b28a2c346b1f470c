"""Each restart is reported, also where the next fault comes while it is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ncclops import restart as inprocess
from ncclops.record import incident_record
from ncclops.testing import JobFactory, note


def report_slowly(incident: inprocess.Incident) -> None:
    if incident.rank == 0 and incident.iteration == 0:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            time.sleep(0.01)
        note("reported")


@inprocess.Wrapper(on_incident=report_slowly)
def fails_twice(call: inprocess.CallWrapper) -> float:
    if os.environ["RANK"] == "1" and call.iteration < 2:
        raise ValueError(f"number {call.iteration}")
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


@pytest.mark.slow
def test_a_report_is_not_cut_by_the_next_fault(ncclops_job: JobFactory, tmp_path: Path) -> None:
    parameters = {"incident_dir": str(tmp_path)}
    result = ncclops_job(fails_twice, world_size=2, wrapper=parameters).run()
    faults = ["ValueError: number 0", "ValueError: number 1"]
    assert [each.exception for each in result.incidents] == faults
    assert len(result.notes_of("reported")) == 1
    written = [incident_record.read(tmp_path / str(number)) for number in (0, 1)]
    assert [each and each.exception for each in written] == faults
    groups = [
        [(group.group, group.rung, group.why) for group in each.groups] for each in written if each
    ]
    assert groups == [[], [("default", "anew", None)]], "as the function has made it, if it has"
