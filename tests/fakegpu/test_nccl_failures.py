"""What fails in NCCL: errors that torch raises or its watchdog sees, and what NCCL logs."""

from __future__ import annotations

import re
import signal
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from ncclops.classify import classify_paths
from ncclops.testing import JobFactory
from tests.fakegpu import nccl_programs as programs
from tests.fakegpu.conftest import Engine
from tests.fakegpu.gpus import REAL
from tests.fakegpu.host import QUICK, Host, until

# --- at the start ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_no_interface_for_the_bootstrap(
    ncclops_job: JobFactory, host: Host, engine: Engine
) -> None:
    env = host.environment | {"NCCL_SOCKET_IFNAME": "=nosuch0"}
    error = ncclops_job(programs.first_collective, world_size=1, env=env).run().value
    assert "invalid usage" in error
    assert engine.second or "Last error:\nBootstrap : no socket interface found" in error


@pytest.mark.gpu
def test_two_ranks_on_one_gpu(ncclops_job: JobFactory, host: Host) -> None:
    values = ncclops_job(programs.on_one_gpu, world_size=2, env=host.environment).run().values
    bus = "[0-9a-f]+" if REAL else "1000"
    for rank in range(2):
        duplicate = f"rank {rank} and rank {1 - rank} both on CUDA device {bus}"
        assert re.search(f"Last [Ee]rror:\\s+Duplicate GPU detected : {duplicate}", values[rank])


def test_the_root_of_the_bootstrap_has_gone(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, engine: Engine
) -> None:
    if engine.second:
        pytest.skip("torch's second engine splits groups off the world, whose root has the store")
    env = host.environment | {"NCCL_SOCKET_RETRY_CNT": "2", "NCCL_SOCKET_RETRY_SLEEP_MSEC": "1"}
    host.set("ncclCommInitRankConfig hang")
    with ncclops_job(programs.pair, world_size=3, args=(tmp_path / "over",), env=env) as job:
        job.start()
        host.wait_for("fault", count=2)
        job.signal(1, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(job.pids[1]), "the end of rank 1")
        host.set()
        result = job.wait()
    refused = (
        r"socketPollConnect: connect to \S+<\d+> returned Connection refused, exceeded error retry"
    )
    assert re.search(refused, result.values[2])
    assert "remote process exited or there was a network error" in result.values[2]


# --- while it runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [("ncclSystemError", "unhandled system error"), ("ncclInternalError", "internal error")],
)
def test_a_call_fails_once(
    ncclops_job: JobFactory, host: Host, engine: Engine, error: str, words: str
) -> None:
    host.set(f"ncclAllReduce nth=2 error={error}")
    values = ncclops_job(programs.steps, world_size=2, args=(3,), env=host.environment).run().values
    for first, second, third in values.values():
        assert (first, third) == ("no error", "no error")
        assert words in second
        assert engine.second or error in second


LOST = {
    "socket": r"socketProgress: Connection closed by remote peer \S+<\d+>",
    "ib": r"NET/IB: Got completion from peer \S+<\d+> with status=12 ",
}


@pytest.mark.parametrize("transport", LOST)
def test_the_watchdog_sees_that_a_peer_has_died(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, engine: Engine, transport: str
) -> None:
    env = (
        host.environment
        | QUICK
        | {
            "FAKEGPU_NCCL_TRANSPORT": transport,
            "NCCL_IB_TIMEOUT": "10",
            "NCCL_DEBUG": "WARN",
        }
    )
    args = (tmp_path / "never",)
    with ncclops_job(programs.wait_for_a_peer, world_size=2, args=args, env=env) as job:
        job.start().wait_for("together", count=2)
        peer = psutil.Process(job.pids[1])
        parent = peer.parent()
        assert parent is not None
        parent.suspend()
        peer.kill()  # a zombie, until its parent goes on: as good as gone
        host.wait_for("nccl-error")
        assert peer.status() == psutil.STATUS_ZOMBIE
        parent.resume()
        result = job.wait()
    log = result.ranks[0].log.read_text()
    assert result.ranks[0].exit_code == -signal.SIGABRT
    assert re.search(rf"NCCL WARN {LOST[transport]}", log)
    lost = "remote process exited or there was a network error"
    if engine.second:
        assert f"nccl hit async error: {lost}\n" in log
    else:
        assert f"{lost}, NCCL version 2.29.7" in log
        assert re.search(rf"Last error:\n{LOST[transport]}", log)
    verdict = classify_paths([result.ranks[0].log]).verdict
    if transport == "ib":
        assert verdict.signature == "ib-retries-exceeded"
    else:
        assert (verdict.class_, verdict.retry_policy) == ("peer-exit", "none")


def test_a_peer_of_the_same_host_dies_without_an_error(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, engine: Engine
) -> None:
    env = host.environment | QUICK | {"NCCL_DEBUG": "INFO"}
    args = (tmp_path / "never", timedelta(seconds=1))
    with ncclops_job(programs.wait_for_a_peer, world_size=2, args=args, env=env) as job:
        job.start().wait_for("together", count=2)
        job.signal(1, signal.SIGKILL)
        result = job.wait()
    log = result.ranks[0].log.read_text()
    assert "[Service thread] Connection closed by localRank 1" in log
    caught = "Watchdog caught collective operation timeout"
    assert (engine.timed_out if engine.second else caught) in log
    assert "remote process exited" not in log
    assert host.events("nccl-error") == []


@pytest.mark.parametrize(
    ("error", "kind", "retry"),
    [
        ("ncclRemoteError", "peer-exit", "none"),
        ("ncclSystemError", "network-transport", "fix-config"),
        ("ncclInternalError", "network-transport", "none"),
    ],
)
def test_an_error_that_the_watchdog_sees_is_no_time_out(
    ncclops_job: JobFactory,
    host: Host,
    tmp_path: Path,
    engine: Engine,
    error: str,
    kind: str,
    retry: str,
) -> None:
    """A rule fails one communicator; the log is that of the whole run."""
    comm = "0" if engine.second else "1/2"  # the world's name, or none
    host.set(f"comm:{comm} rank=0 nth=2 error={error}")
    args = (tmp_path / "never",)
    env = host.environment | QUICK | {"NCCL_DEBUG": "INFO"}
    with ncclops_job(programs.wait_for_a_peer, world_size=2, args=args, env=env) as job:
        job.start().wait_for("together", count=2)
        host.wait_for("nccl-error")
        job.signal(1, signal.SIGKILL)
        result = job.wait()
    assert result.ranks[0].exit_code == -signal.SIGABRT
    (event,) = host.events("nccl-error")
    assert (event.rank, event.fields["comm"]) == (0, comm)
    log = result.ranks[0].log
    seen = "nccl hit async error" if engine.second else "failure detected by watchdog"
    assert seen in log.read_text()
    verdict = classify_paths([log]).verdict
    assert (verdict.class_, verdict.retry_policy, verdict.rank) == (kind, retry, 0)


def test_a_kernel_that_never_ends_holds_up_the_abort(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, engine: Engine
) -> None:
    host.set("device:allreduce rank=0 nth=3 hang=forever")
    go, args = tmp_path / "go", ("absence", tmp_path / "go")
    env = host.environment
    expected = {(0, "2/2"), (1, "1/2"), (1, "2/2")}  # not rank 0's first
    if engine.second:  # which has named them, and made the world, that ends last
        expected = {(0, "2"), (1, "0"), (1, "1"), (1, "2")}
    with ncclops_job(programs.hang_until_aborted, world_size=2, args=args, env=env) as job:
        job.start().wait_for("begun", count=2)
        go.touch()
        host.wait_for("nccl-end", count=len(expected))
        job.signal(0, signal.SIGKILL)
        assert job.wait().values == {1: "no work"}
    ended = {(event.rank, event.fields["comm"]) for event in host.events("nccl-end")}
    assert ended == expected


# --- the log --------------------------------------------------------------------------------------


def test_lines_of_the_log(ncclops_job: JobFactory, host: Host, tmp_path: Path) -> None:
    env = host.environment | {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,COLL",
        "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.%p"),
    }
    ncclops_job(programs.steps, world_size=2, args=(2,), env=env).run()
    (log,) = [text for path in tmp_path.glob("nccl.*") if "rank 0 " in (text := path.read_text())]
    head = r"^[\w-]+:\d+:\d+ \[0\] NCCL INFO "
    of_comm = r"comm 0x[0-9a-f]+ rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0x[0-9a-f]+"
    for line in (
        r"NCCL version 2\.29\.7\+cuda13\.0",
        rf"ncclCommInitRankConfig {of_comm} - Init START",
        rf"ncclCommInitRankConfig {of_comm} - Init COMPLETE",
        r"AllReduce: opCount 1 sendbuff 0x\w+ recvbuff 0x\w+ count 1 datatype 7 op 0 root 0 "
        r"comm 0x\w+ \[nranks=2\] stream .*",
    ):
        assert re.search(f"{head}{line}$", log, re.MULTILINE), line
    assert "Bootstrap" not in log


@pytest.mark.gpu
def test_the_log_is_silent_by_default(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(programs.steps, world_size=2, args=(2,), env=host.environment)
    for rank in job.run().ranks.values():
        assert "NCCL INFO" not in rank.log.read_text()
