"""A main thread that no abort frees: where it is, and what becomes of its rank."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from ncclops.restart import blocked, waiting
from ncclops.restart._groups import aborting, open_operations
from tests.fakegpu.host import Host
from tests.fakegpu.place import HERE

from .conftest import Job, lanes
from .test_faults import causes, returned_from

C10D = "/venv/torch/distributed/distributed_c10d.py"
MEASURED = "/src/ncclops/worker/waits.py"
COUNTED = open_operations.__file__
# How ranks make a communicator here.
BY = "new group" if HERE.has_second_engine else "first message"
FIRST_ENGINE = "torch's first engine makes a communicator in the first call that needs it"
GRAPH = ("/venv/torch/autograd/graph.py", "_engine_run_backward")


def frames(*calls: tuple[str, str], group: object = None) -> FrameType:
    """The innermost frame of a stack of (file, function), outermost first. All use ``group``."""
    found: dict[str, Any] = {"look": lambda _: sys._getframe(1)}
    for number, (file, name) in reversed(list(enumerate(calls))):
        inner = f"call{number + 1}" if number + 1 < len(calls) else "look"
        code = f"def {name}(group):\n    return {inner}(group)\ncall{number} = {name}"
        exec(compile(code, file, "exec"), found)
    frame = found["call0"](group)
    assert isinstance(frame, FrameType)
    return frame


@pytest.mark.parametrize(
    ("calls", "may_wait"),
    [
        ([("/work/train.py", "main"), (C10D, "all_reduce")], True),
        ([("/work/train.py", "main"), (C10D, "_new_process_group_helper")], True),
        ([(C10D, "recv"), (MEASURED, "enqueuing")], True),
        ([(C10D, "batch_isend_irecv"), (COUNTED, "end_and_count")], True),
        ([("/venv/torch/distributed/_functional.py", "f"), ("/venv/torch/_ops.py", "call")], True),
        ([("/work/train.py", "main"), ("/venv/torch/nn/linear.py", "forward")], False),
        ([(C10D, "all_reduce"), ("/work/hook.py", "hook")], False),
        ([(C10D, "destroy_process_group")], False),
        ([("/venv/torch/distributed/checkpoint/filesystem.py", "write")], False),
    ],
)
def test_only_a_call_of_torch_distributed_may_wait_for_peers(
    calls: list[tuple[str, str]], *, may_wait: bool
) -> None:
    assert waiting.is_in_collective(frames(*calls)) == may_wait


@pytest.mark.parametrize(
    ("maker", "makes"),
    [("_create_nccl2_process_group", True), ("_create_gloo_process_group", False)],
)
def test_a_communicator_that_no_backend_shows_yet_counts_as_one_of_nccl(
    maker: str, *, makes: bool
) -> None:
    """torch's second engine makes it in the constructor."""
    calls = ("/work/train.py", "main"), (C10D, "_new_process_group_helper"), (C10D, maker)
    aborting.abort_groups(frames(*calls))
    assert aborting.aborted_nccl == makes


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        (["/work/train.py", C10D], True),
        (["/work/train.py", C10D, MEASURED], True),
        (["/work/train.py", C10D, COUNTED], True),
        ([C10D, "/work/hook.py"], False),
        (["/venv/torch/distributed/checkpoint/filesystem.py"], False),
        (["/venv/torch/distributed/checkpoint/utils.py", C10D], True),
        ([], False),
    ],
)
def test_a_stack_that_ends_in_torch_distributed_waits_for_peers(
    files: list[str], *, waits: bool
) -> None:
    lines = [f'  File "{file}", line 3, in call\n    return call()\n' for file in files]
    assert waiting.waits_for_peers("".join(["Main thread:\n", *lines])) == waits


@pytest.mark.parametrize(
    ("calls", "waits"),
    [
        ([("/work/train.py", "main"), GRAPH], True),
        ([("/work/train.py", "main"), GRAPH, ("/work/hook.py", "hook")], False),
        ([("/work/train.py", "_engine_run_backward")], False),
    ],
)
def test_a_backward_pass_is_waited_for_where_nothing_of_python_runs_in_it(
    calls: list[tuple[str, str]], *, waits: bool
) -> None:
    assert waiting.is_in_backward(frames(*calls)) == waits


def test_whom_it_waits_for_are_the_members_of_the_group_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = dist.ProcessGroup(0, 2)
    monkeypatch.setattr(aborting, "_members", {id(group): frozenset({1, 5})})
    assert blocked.members(frames((C10D, "recv"), group=group)) == frozenset({1, 5})
    assert blocked.members(frames((C10D, "recv"), group=dist.ProcessGroup(0, 2))) is None
    assert blocked.members(frames((C10D, "_new_process_group_helper"))) is None
    assert blocked.members(frames(("/work/train.py", "main"), group=group)) is None


# A new group of the second engine waits for Gloo first where it has that.
@lanes("nccl", *([] if BY == "new group" else ["mixed"]))
def test_a_rank_whose_peer_does_not_come_to_a_communicator_is_ended_and_no_cause(job: Job) -> None:
    """Neither at the hard timeout, nor late: its group has a communicator, for other calls."""
    codes = job.start(3, "fault_programs:making_a_pair", missing=True, by=BY).wait()
    assert codes == {0: -signal.SIGTERM, 1: 0, 2: 0}
    assert returned_from(job, 1) == [1, 2]
    ((cause, culprit),) = causes(job)
    assert cause == "exception"
    assert culprit in (1, 2)
    assert "it still waits in NCCL, which no abort ends" in job.monitor_log(0)


@pytest.mark.skipif(not HERE.has_second_engine, reason=f"{FIRST_ENGINE}, and no abort ends that")
@lanes("nccl")
@pytest.mark.parametrize("program", ["making_a_pair", "first_backward"])
def test_a_rank_whose_peer_does_not_come_to_a_call_of_nccl_restarts(job: Job, program: str) -> None:
    """torch's abort would wait for the lock that it holds in that call, until the hard timeout."""
    job.start(3, f"fault_programs:{program}", missing=False, by="first message")
    assert job.wait() == {0: 0, 1: 0, 2: 0}
    assert returned_from(job, 1) == [0, 1, 2]


@pytest.mark.skipif(HERE.has_second_engine, reason=f"not as {FIRST_ENGINE}")
@lanes("nccl")
def test_a_rank_whose_peer_does_not_come_to_the_first_collective_of_a_backward_pass_is_ended(
    job: Job,
) -> None:
    """It waits in a thread of autograd, in DDP's C++: no frame of Python shows a collective."""
    codes = job.start(3, "fault_programs:first_backward").wait()
    assert codes == {0: -signal.SIGTERM, 1: 0, 2: 0}
    assert returned_from(job, 1) == [1, 2]
    assert causes(job) == {("exception", 1)}
    assert "it still waits in NCCL, which no abort ends" in job.monitor_log(0)


@pytest.mark.skipif(HERE.has_second_engine, reason=f"not as {FIRST_ENGINE}, it is for all ranks")
@lanes("nccl")
def test_ranks_that_are_just_making_a_communicator_are_left_to_it(job: Job, host: Host) -> None:
    """All of them are there: it takes its time, as a large one may, and another rank has failed."""
    host.set("ncclCommInitRankConfig rank=0 nth=3 delay=4")
    codes = job.start(3, "fault_programs:making_a_pair", missing=False, by="first message").wait()
    assert codes == {0: 0, 1: 0, 2: 0}
    assert returned_from(job, 1) == [0, 1, 2]
