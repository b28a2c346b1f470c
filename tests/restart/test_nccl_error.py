"""An error that NCCL reports outside of any call."""

from __future__ import annotations

from tests.fakegpu.host import Host

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
