"""Collectives are counted by what flight recorders know, and only believed as far as that goes."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from ncclops.receipts.collectives import Counted, count
from tests.conftest import LIMIT_S, clean_environ
from tests.lanes import IN_SCRIPT, LaneProcess, lanes


def status(enqueued: object, completed: object) -> dict[str, Any]:
    return {"last_enqueued_collective": enqueued, "last_completed_collective": completed}


NCCL, OTHER = "_dump_nccl_trace_json/0", "_dump_fr_trace_json/0"


@pytest.mark.parametrize(
    ("statuses", "counted"),
    [
        pytest.param({}, None, id="no recorder"),
        pytest.param({NCCL: status("-1", "-1")}, None, id="nothing yet"),
        pytest.param({NCCL: status("8", "7")}, (8, 7), id="NCCL waits"),
        pytest.param({NCCL: status("3", "8")}, (3, 2), id="NCCL waits in a receive"),
        pytest.param({OTHER: status("8", "8")}, (8, 8), id="Gloo is done"),
        pytest.param({OTHER: status("8", "7")}, (8, None), id="Gloo reports out of order"),
        pytest.param({NCCL: status("8", "8"), OTHER: status("2", "2")}, (10, 10), id="two groups"),
        pytest.param({NCCL: {"last_enqueued_collective": "x"}}, None, id="other words"),
    ],
)
def test_what_is_counted(statuses: dict[str, dict[str, Any]], counted: Counted | None) -> None:
    assert count(statuses) == counted


def test_groups_of_an_earlier_start_do_not_count() -> None:
    statuses = {NCCL: status(8, 7), "_dump_nccl_trace_json/1": status(3, 3)}
    assert count(statuses, frozenset({NCCL})) == (3, 3)


@pytest.mark.slow
@lanes("gloo", "nccl", "mixed")
def test_a_real_group_is_counted(lane_process: LaneProcess) -> None:
    """And what a GPU has completed."""
    source = """
import time, torch.distributed as dist
from ncclops.receipts.collectives import count, read_statuses
assert count(read_statuses()) is None
dist.init_process_group(**lane, store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(2, device=device))
ends = {(3, 3)} if device else {(3, 3), (3, None)}
deadline = time.monotonic() + 60
while (counted := count(read_statuses())) not in ends and time.monotonic() < deadline:
    time.sleep(0.01)  # torch's watchdog counts what has completed
assert counted in ends, counted
dist.destroy_process_group()  # torch may abort at the end of a process that has not done so
"""
    recorder = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}
    done = subprocess.run(
        [lane_process.python, "-c", IN_SCRIPT + source],
        env=clean_environ(lane_process.environment | recorder | {"LOCAL_RANK": "0"}),
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr.decode()
