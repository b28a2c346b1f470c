"""Collectives are counted by what flight recorders know, and only believed as far as that goes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ncclops.receipts.collectives import (
    Counted,
    awaited,
    count,
    may_wait_for_batch,
    read_statuses,
)
from tests.conftest import LIMIT_S, clean_environ
from tests.lanes import IN_SCRIPT, LaneProcess, lanes


def status(enqueued: object, completed: object) -> dict[str, Any]:
    return {"last_enqueued_collective": enqueued, "last_completed_collective": completed}


NCCL, OTHER = "nccl/0", "gloo/0"


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


def test_a_call_that_torch_does_not_count_yet_is_pending() -> None:
    assert count({NCCL: status("7", "7")}, is_in_call=True) == (8, 7)
    assert count({NCCL: status("8", "7")}, is_in_call=True) == (8, 7), "it is that one"
    assert count({}, is_in_call=True) is None


def test_groups_of_an_earlier_start_do_not_count() -> None:
    statuses = {NCCL: status(8, 7), "nccl/1": status(3, 3)}
    assert count(statuses, frozenset({NCCL})) == (3, 3)


def pending(number: int, name: str, group: int = 0) -> dict[str, Any]:
    """An entry of the recorder, as far as it is read."""
    return {
        "record_id": number,
        "profiling_name": f"nccl:{name}",
        "pg_id": group,
        "process_group": [str(group), "undefined"],
    }


@pytest.mark.parametrize(
    ("entries", "rank"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([pending(4, "all_reduce")], None, id="a collective"),
        pytest.param([pending(5, "send 1->2"), pending(4, "recv 1<-0")], 0, id="the oldest"),
        pytest.param([pending(4, "all_reduce"), pending(5, "recv 1<-0")], None, id="behind one"),
        pytest.param([pending(4, "recv 0<-1", group=1)], 5, id="a rank of a group"),
        pytest.param([pending(4, "recv 0<-9", group=1)], None, id="no such rank"),
        pytest.param(
            [pending(4, "send 1->2"), pending(5, "recv 1<-2"), pending(6, "coalesced")], 2,
            id="a batch with one rank",
        ),
        pytest.param(
            [pending(4, "send 1->2"), pending(5, "recv 1<-0"), pending(6, "coalesced")], None,
            id="a batch with several",
        ),
        pytest.param([pending(4, "recv 1<-0", group=2)], None, id="a group of an earlier start"),
    ],
)  # fmt: skip
def test_whom_a_message_waits_for(
    entries: list[dict[str, Any]], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {"0": {"ranks": "[0, 1, 2]"}, "1": {"ranks": "[3, 5]"}, "2": {"ranks": "[0, 1]"}}
    recorder = ModuleType("recorder")
    recorder._dump_nccl_trace_json = lambda _entries, _active: json.dumps(  # type: ignore[attr-defined]
        {"entries": entries, "pg_config": ranks}
    )
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    assert awaited(frozenset({"nccl/2"})) == rank


def of_second_engine(dumps: Callable[[bool], dict[str, Any]]) -> ModuleType:
    """torch with that engine, whose recorder says ``dumps`` of all its operations or the pending
    ones; the others have nothing."""
    module = ModuleType("recorder")
    module.ProcessGroupNCCL2 = module._reset_fr_trace = object()  # type: ignore[attr-defined]
    module._dump_fr_trace_json = lambda _entries, active, backend="gloo": json.dumps(  # type: ignore[attr-defined]
        dumps(active) if backend == "nccl2" else {}
    )
    module._dump_nccl_trace_json = lambda _entries, _active: "{}"  # type: ignore[attr-defined]
    return module


def test_the_second_engine_of_nccl_is_counted_from_one_and_asked_whom_a_message_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = {
        "entries": [pending(4, "recv 1<-0")],
        "pg_config": {"0": {"ranks": "[2, 3]"}},
        "pg_status": {"0": status("4", "3"), "1": status("0", "-1")},
    }
    module = of_second_engine(lambda _active: document)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
    assert count(read_statuses()) == (6, 4)
    assert count(read_statuses(), frozenset({"nccl2/0"})) == (1, 0)
    assert awaited() == 2


@pytest.mark.parametrize(
    ("messages", "may_wait"),
    [([], False), ([False], False), ([False, True], True), ([True, False], False)],
)
def test_a_message_that_comes_last_may_wait_in_the_second_engine(
    messages: list[bool], may_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [pending(n, "any") | {"is_p2p": each} for n, each in enumerate(messages)]
    module = of_second_engine(lambda active: {"entries": [] if active else entries})
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
    assert may_wait_for_batch() == may_wait
    assert not may_wait_for_batch(frozenset({"nccl2/0"}))


@pytest.mark.slow
@lanes("gloo", "nccl", "mixed")
def test_a_real_group_is_counted(lane_process: LaneProcess) -> None:
    """And what a GPU has completed, and whom a message of NCCL waits for."""
    source = """
import time, torch.distributed as dist
from ncclops.receipts.collectives import awaited, count, may_wait_for_batch, read_statuses
assert count(read_statuses()) is None
dist.init_process_group(**lane, store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(2, device=device))
ends = {(3, 3)} if device else {(3, 3), (3, None)}
deadline = time.monotonic() + 60
while (counted := count(read_statuses())) not in ends and time.monotonic() < deadline:
    time.sleep(0.01)  # torch's watchdog counts what has completed
assert counted in ends, counted
if device:
    second_engine = dist.group.WORLD._get_backend(device).name() == "nccl2"
    assert awaited() is None
    with dist._coalescing_manager(device=device, async_ops=True):
        dist.irecv(torch.ones(1, device=device), 0)
        assert second_engine or awaited() == 0
        dist.isend(torch.ones(1, device=device), 0)
    assert may_wait_for_batch() == second_engine
    dist.all_reduce(torch.ones(2, device=device))
    assert not may_wait_for_batch()
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
