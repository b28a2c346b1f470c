"""An error that NCCL reports outside of any call."""

from __future__ import annotations

import socket

from tests.fakegpu.host import Host
from tests.fakegpu.place import HERE

from .conftest import Job, lanes
from .test_faults import causes, returned_from


@lanes("nccl")
def test_an_error_that_no_call_returns_restarts_all_ranks_at_once(job: Job, host: Host) -> None:
    """torch's watchdog prints it, with the stack of the collective, and the ranks would wait."""
    host.set("comm:* rank=1 nth=2 times=1 error=ncclRemoteError")
    assert job.start(2, "fault_programs:told_by_nccl").wait() == {0: 0, 1: 0}
    assert returned_from(job, 1) == [0, 1]
    assert causes(job) == {("nccl-error", 1)}
    loaded = {e["rank"]: e["is_loaded"] for e in job.events("compiler")}
    assert loaded == {0: False, 1: False}, "printing a stack imports torch's compiler"


@lanes("nccl")
def test_no_process_restarts_that_has_left_operations_of_nccl_open(job: Job) -> None:
    """All that it called afterwards would wait for their end, and torch take it for done."""
    job.start(3, "fault_programs:raises_amid_operations")
    if HERE.has_second_engine:  # which calls NCCL for none of them before the last
        assert job.wait() == {0: 0, 1: 0, 2: 0}
        return
    assert job.wait() == {0: 0, 1: 1, 2: 0}
    assert returned_from(job, 1) == [0, 2]
    assert causes(job) == {("exception", 1)}
    for incident in job.events("incident"):
        (left,) = [fault for fault in incident["faults"] if fault["gone"]]
        assert left["initial_rank"] == 1
        assert left["escalation"]["to"] == "respawn"


@lanes("nccl")
def test_a_batch_of_messages_is_not_cut_by_a_restart(job: Job) -> None:
    assert job.start(2, "fault_programs:exchanging", waits="for the restart").wait() == {0: 0, 1: 0}
    assert returned_from(job, 1) == [0, 1]
    assert causes(job) == {("exception", 1)}


@lanes("nccl")
def test_a_batch_of_messages_that_does_not_end_costs_its_process_alone(job: Job) -> None:
    job.start(3, "fault_programs:exchanging", waits="for good")
    if HERE.has_second_engine:
        assert job.wait() == {0: 0, 1: 0, 2: 0}
        return
    assert job.wait() == {0: 1, 1: 0, 2: 0}
    assert returned_from(job, 1) == [1, 2]
    assert causes(job) == {("exception", 1)}
    (left,) = {
        f["escalation"]["to"] for i in job.events("incident") for f in i["faults"] if f["gone"]
    }
    assert left == "respawn"


@lanes("nccl")
def test_no_process_restarts_after_an_error_that_every_call_of_cuda_repeats(
    job: Job, host: Host
) -> None:
    host.set("device:allreduce rank=1 nth=2 error=cudaErrorIllegalAddress")
    job.start(3, "fault_programs:meets_a_cuda_error")
    assert job.wait() == {0: 0, 1: 1, 2: 0}
    assert returned_from(job, 1) == [0, 2]
    assert causes(job) == {("exception", 1)}
    for incident in job.events("incident"):
        (left,) = [fault for fault in incident["faults"] if fault["gone"]]
        assert (left["kind"], left["initial_rank"]) == ("health-check", 1)
        assert left["raised"]["name"] == "CudaContextLost"
        assert left["device"] in left["summary"]
        assert "CUDA error: an illegal memory access" in left["summary"]
        assert left["device"].startswith("GPU 1 (GPU-")
        assert left["device"].endswith(f" on {socket.gethostname()}")
