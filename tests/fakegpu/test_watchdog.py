"""What torch's real watchdog and heartbeat monitor do, by the settings that our profiles choose.

``docs/environment.md`` says the same for those who set the variables. The torch is that of
``FAKE_GPU_TORCH``; with 2.14 and 2.15, ``TORCH_DIST_USE_NCCL2`` chooses the engine.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ncclops.testing import Job, JobFactory
from ncclops.testing.results import RankResult
from tests.fakegpu import watchdog_programs as programs
from tests.fakegpu.conftest import Engine
from tests.fakegpu.host import QUICK, Host, until

FAILED = "remote process exited or there was a network error"
# As torch ends a process: an exception that nobody catches, in the watchdog's thread.
ABORTED = -signal.SIGABRT


def end_of(rank: int, job: Job) -> RankResult:
    """What became of ``rank``; then of the others, which wait for ever."""
    until(lambda: not psutil.pid_exists(job.pids[rank]), f"the end of rank {rank}")
    for other in set(job.pids) - {rank}:
        job.signal(other, signal.SIGKILL)
    return job.wait().ranks[rank]


def said(job: Job, rank: int, text: str) -> bool:
    return text in (job.directory / f"log-{rank}").read_text()


# --- timeouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["default", "new_group", "new_group afterwards", "mixed", "split", "mesh"]
)
def test_the_watchdog_goes_by_a_timeout_that_was_shortened(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, engine: Engine, how: str
) -> None:
    ranks, args = 4 if how == "mesh" else 2, (how, tmp_path / "never")
    env = host.environment | QUICK
    with ncclops_job(programs.tightened, world_size=ranks, args=args, env=env) as job:
        job.start().wait_for("tightened", count=ranks)
        ended = end_of(0, job)
    assert ended.exit_code == ABORTED
    assert engine.timed_out in ended.log.read_text()


@pytest.mark.extended
def test_what_is_under_way_keeps_its_timeout(ncclops_job: JobFactory, host: Host) -> None:
    env = host.environment | QUICK
    assert ncclops_job(programs.under_way, world_size=2, env=env).run().value == 1.0


# --- async error handling -------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["timeout", "error"])
@pytest.mark.parametrize(
    "handling", ["0", "1", *(pytest.param(each, marks=pytest.mark.extended) for each in "23")]
)
def test_async_error_handling(
    ncclops_job: JobFactory,
    host: Host,
    tmp_path: Path,
    engine: Engine,
    handling: str,
    failure: str,
) -> None:
    """0: nothing; 1: abort and end the process; 2: abort; 3: end the process."""
    if failure == "error":
        host.set("comm:* rank=0 nth=2 error=ncclRemoteError")
    seen = engine.timed_out if failure == "timeout" else FAILED
    env = host.environment | QUICK | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": handling}
    go = tmp_path / "go"
    with ncclops_job(programs.failed_collective, world_size=2, args=(go,), env=env) as job:
        job.start().wait_for("begun", count=2)
        until(lambda: said(job, 0, seen), f"the watchdog's {seen}")
        if handling == "2":
            host.wait_for("nccl-end")
        if handling in ("1", "3"):
            ended = end_of(0, job)
            assert ended.exit_code == ABORTED
        else:
            go.touch()
            assert job.wait().value == "goes on"
    ends = [event.fields["how"] for event in host.events("nccl-end", rank=0)]
    assert ends == (["Abort"] if handling in ("1", "2") else [])


def test_without_rethrow_only_the_first_engine_leaves_the_process(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, engine: Engine
) -> None:
    env = host.environment | QUICK | {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    go = tmp_path / "go"
    with ncclops_job(programs.failed_collective, world_size=2, args=(go,), env=env) as job:
        job.start().wait_for("begun", count=2)
        until(lambda: said(job, 0, engine.timed_out), "the watchdog's timeout")
        if engine.second:
            assert end_of(0, job).exit_code == ABORTED
        else:
            go.touch()
            assert job.wait().value == "goes on"


# --- the heartbeat monitor ------------------------------------------------------------------------

HEARTBEAT = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(programs.HEARTBEAT_S)}


@contextmanager
def stuck_watchdog(
    ncclops_job: JobFactory, host: Host, go: Path, **variables: str
) -> Iterator[Job]:
    """A job of one rank, whose watchdog asks for an event and gets no answer."""
    env = host.environment | QUICK | HEARTBEAT | variables
    with ncclops_job(programs.stuck_watchdog, world_size=1, args=(go,), env=env) as job:
        job.start().wait_for("begun")
        host.set("cudaEventQuery hang=forever")
        go.touch()
        host.wait_for("fault")
        yield job


def test_a_silent_watchdog_ends_the_process(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, engine: Engine
) -> None:
    with stuck_watchdog(ncclops_job, host, tmp_path / "go") as job:
        if engine.second:  # it has no monitor
            job.wait_for("goes on")
            return
        ended = end_of(0, job)
    assert ended.exit_code == ABORTED
    assert "watchdog got stuck for 2 seconds" in ended.log.read_text()


@pytest.mark.extended
def test_without_monitoring_it_does_not(
    ncclops_job: JobFactory, host: Host, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with stuck_watchdog(ncclops_job, host, go, TORCH_NCCL_ENABLE_MONITORING="0") as job:
        job.wait_for("goes on")


@pytest.mark.extended
def test_a_heartbeat_timeout_is_none_of_collectives(ncclops_job: JobFactory, host: Host) -> None:
    env = host.environment | QUICK | HEARTBEAT
    job = ncclops_job(programs.late_peer, world_size=2, env=env)
    assert job.run().value == 1.0


# --- blocking wait --------------------------------------------------------------------------------

# Async error handling does not count then.
BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}


def test_blocking_wait_raises_in_the_main_thread(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, engine: Engine
) -> None:
    """Only of works that are waited for: a collective without ``async_op`` is none in the first
    engine, from 2.8 on."""
    env = host.environment | QUICK | BLOCKING
    args = (tmp_path / "over",)
    result = ncclops_job(programs.blocking_wait, world_size=2, args=args, env=env).run()
    at_once, waited = result.values[0]
    waits = engine.second or engine.torch < (2, 8)
    assert engine.raised in (at_once if waits else waited)
    assert waits or at_once == "no error"


@pytest.mark.extended
def test_with_blocking_wait_only_a_wait_sees_a_timeout(ncclops_job: JobFactory, host: Host) -> None:
    env = host.environment | QUICK | BLOCKING
    result = ncclops_job(programs.nobody_waits, world_size=2, env=env).run()
    assert result.values == {0: "rank 0 goes on", 1: "rank 1 goes on"}
