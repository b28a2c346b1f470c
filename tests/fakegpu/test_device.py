"""The device half, by the real CUDA build of torch: each behaviour that tests of NCCL build on."""

from __future__ import annotations

import signal

import pytest

from ncclops.testing import JobFactory
from tests.fakegpu import device_programs as programs
from tests.fakegpu.host import Host

pytestmark = pytest.mark.slow

GIB = 1 << 30
MIB = 1 << 20
LAUNCH_FAILURE = "CUDA error: unspecified launch failure"


def test_a_host_has_eight_h200(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(programs.properties, world_size=1, env=host.environment)
    assert job.run().value == [("NVIDIA H200", 141 * GIB)] * 8


@pytest.mark.parametrize("visible", ["2,5", "GPU-{2},GPU-{5}", "2,5,-1,3"])
def test_visible_devices_are_named_by_number_and_uuid(
    ncclops_job: JobFactory, host: Host, visible: str
) -> None:
    all_of_them = [f"66616b65-6770-7500-0000-{gpu:012x}" for gpu in range(8)]
    env = host.environment | {"CUDA_VISIBLE_DEVICES": visible.format(*all_of_them)}
    found = ncclops_job(programs.uuids, world_size=1, env=env).run().value
    assert found == [all_of_them[2], all_of_them[5]]


# --- what kernels compute -------------------------------------------------------------------------


@pytest.mark.gpu
def test_kernels_that_are_simulated_compute_what_the_cpu_does(
    ncclops_job: JobFactory, host: Host
) -> None:
    env = host.environment | {"FAKEGPU_STRICT": "1"}
    assert ncclops_job(programs.differences, world_size=1, env=env).run().value == []


@pytest.mark.gpu
def test_tensors_are_compared(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(programs.equality, world_size=1, env=host.environment)
    assert job.run().value == (True, False)


def test_a_kernel_that_is_not_simulated_is_logged_or_refused(
    ncclops_job: JobFactory, host: Host
) -> None:
    assert ncclops_job(programs.sine, world_size=1, env=host.environment).run().value == "nothing"
    (event,) = host.events("not-simulated")
    assert "sin_kernel_cuda" in event.fields["kernel"]
    strict = host.environment | {"FAKEGPU_STRICT": "1"}
    refused = ncclops_job(programs.sine, world_size=1, env=strict).run().value
    assert refused == "CUDA error: operation not supported"


# --- streams and events ---------------------------------------------------------------------------


def test_streams_run_in_order_and_wait_for_events(ncclops_job: JobFactory, host: Host) -> None:
    with ncclops_job(programs.wait_across_streams, world_size=1, env=host.environment) as job:
        host.set("device:kernel nth=3- hang")
        job.start().wait_for("queued")
        host.set()
        assert job.wait().value == ([False] * 3 + [True] * 3, 7.0)


def test_a_slow_kernel_takes_its_time_between_two_events(
    ncclops_job: JobFactory, host: Host
) -> None:
    host.set("device:kernel nth=2 delay=0.2")
    taken = ncclops_job(programs.times, world_size=1, env=host.environment).run().value
    assert taken >= 0.2  # a lower bound, which no slow machine can break


def test_a_function_of_the_host_is_called_in_its_turn(ncclops_job: JobFactory, host: Host) -> None:
    host.set("device:kernel nth=2 hang")
    with ncclops_job(programs.host_function, world_size=1, env=host.environment) as job:
        job.start().wait_for("queued")
        host.set()
        assert job.wait().value == ([], ["3.0"])


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("expandable", [False, True])
def test_memory_is_counted_and_runs_out(
    ncclops_job: JobFactory, host: Host, expandable: bool
) -> None:
    env = host.environment | {
        "FAKEGPU_MEMORY_GIB": "3.5",
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}",
    }
    found = ncclops_job(programs.allocations, world_size=1, env=env).run().value
    before, during, after = found["free"]
    assert GIB <= before - during <= GIB + 64 * MIB  # and what the allocator takes for small ones
    assert after == before
    assert "CUDA out of memory" in found["error"]
    assert found["expandable"] == [expandable]
    assert found["sum"] == 4000.0


def test_memory_that_was_freed_is_an_illegal_address(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(programs.use_after_free, world_size=1, env=host.environment)
    illegal = "CUDA error: an illegal memory access was encountered"
    assert job.run().value == ["700", illegal, illegal, illegal]


def test_memory_behind_an_allocation_is_an_illegal_address(
    ncclops_job: JobFactory, host: Host
) -> None:
    job = ncclops_job(programs.use_beyond_end, world_size=1, env=host.environment)
    assert job.run().value == 700


# --- faults ---------------------------------------------------------------------------------------


def test_an_error_of_the_device_is_sticky(ncclops_job: JobFactory, host: Host) -> None:
    host.set("device:kernel nth=3 error=cudaErrorLaunchFailure")
    job = ncclops_job(programs.fills, world_size=1, args=(5,), env=host.environment)
    assert job.run().value == ["done", "done"] + [LAUNCH_FAILURE] * 3
    (event,) = host.events("context-corrupted")
    assert event.fields == {"error": "cudaErrorLaunchFailure"}


def test_a_rule_strikes_one_rank_for_a_number_of_times(ncclops_job: JobFactory, host: Host) -> None:
    host.set("cudaLaunchKernel rank=1 nth=2- times=2 error=cudaErrorNotSupported")
    job = ncclops_job(programs.fills, world_size=2, args=(5,), env=host.environment)
    refused = "CUDA error: operation not supported"
    assert job.run().values == {0: ["done"] * 5, 1: ["done", refused, refused, "done", "done"]}


def test_rules_of_the_environment_last_whatever_the_file_says(
    ncclops_job: JobFactory, host: Host
) -> None:
    # torch empties its cache and tries once more before it gives up
    env = host.environment | {"FAKEGPU_RULES": "cudaMalloc nth=2-3 error=cudaErrorMemoryAllocation"}
    host.set("device:copy delay=0.001")
    job = ncclops_job(programs.allocation_attempts, world_size=1, env=env)
    assert job.run().value == ["done", "out of memory", "done"]


def test_a_hang_for_ever_outlives_its_rule(ncclops_job: JobFactory, host: Host) -> None:
    host.set("device:kernel nth=2 hang=forever")
    with ncclops_job(programs.fill_and_wait, world_size=1, env=host.environment) as job:
        job.start().wait_for("queued")
        host.set("device:kernel nth=100 hang")
        job.signal(0, signal.SIGKILL)
        assert job.join() == {0: -signal.SIGKILL}


def test_a_hang_ends_with_its_rule(ncclops_job: JobFactory, host: Host) -> None:
    host.set("device:kernel nth=2 hang")
    with ncclops_job(programs.fill_and_wait, world_size=1, env=host.environment) as job:
        job.start().wait_for("queued")
        host.set("device:kernel nth=100 hang")
        assert job.wait().value == 5.0


@pytest.mark.gpu
def test_a_child_of_a_process_that_has_used_the_device_may_not(
    ncclops_job: JobFactory, host: Host
) -> None:
    job = ncclops_job(programs.in_a_fork, world_size=1, env=host.environment)
    assert job.run().value == 3  # cudaErrorInitializationError


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("cudaMallok error=2", "no function of this name"),
        ("cudaMalloc error=cudaErrorOfNoName", "no error of CUDA, NCCL or NVML"),
        ("cudaMalloc nth=2", "write what happens"),
        ("cudaMalloc sometimes hang", "unknown"),
        ("cudaMalloc nth=0 hang", "write nth=3"),
        ("gpu 0 temprature_c=90", "unknown"),
    ],
)
def test_a_line_that_cannot_be_read_ends_the_process(
    ncclops_job: JobFactory, host: Host, rule: str, problem: str
) -> None:
    host.set(rule)
    program = programs.first_call if not rule.startswith("gpu") else programs.watch_gpu
    result = ncclops_job(program, world_size=1, env=host.environment).run()
    assert result.ranks[0].exit_code == -signal.SIGABRT
    assert problem in result.ranks[0].log_tail()
