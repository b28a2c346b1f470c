"""Collectives are counted by what flight recorders know, and only believed as far as that goes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from ncclops.receipts.collectives import Counted, count
from tests.conftest import LIMIT_S, clean_environ


def status(enqueued: object, completed: object) -> dict[str, Any]:
    return {"last_enqueued_collective": enqueued, "last_completed_collective": completed}


NCCL, OTHER = "_dump_nccl_trace_json/0", "_dump_fr_trace_json/0"


@pytest.mark.parametrize(
    ("statuses", "counted"),
    [
        pytest.param({}, None, id="no recorder"),
        pytest.param({NCCL: status("-1", "-1")}, None, id="nothing yet"),
        pytest.param({NCCL: status("8", "7")}, (8, 7), id="NCCL waits"),
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
def test_a_real_group_is_counted() -> None:
    source = """
import torch, torch.distributed as dist
from ncclops.receipts.collectives import count, read_statuses
assert count(read_statuses()) is None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(2))
enqueued, completed = count(read_statuses()) or (None, None)
assert enqueued == 3, enqueued
assert completed in (3, None), completed
dist.destroy_process_group()  # torch may abort at the end of a process that has not done so
"""
    environ = clean_environ({"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"})
    done = subprocess.run(
        [sys.executable, "-c", source], env=environ, capture_output=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr.decode()
