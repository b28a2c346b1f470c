"""Causes over echoes: whose line it was, when, and what merely followed from it."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ncclops.classify import Report, Scanner, classify_bytes, classify_paths
from tests.classify.shipped import LOADED


def watchdog(rank: int, minute: int, second: int = 0) -> str:
    return (
        f"[rank{rank}]:[E606 09:{minute:02d}:{second:02d}.164985344 ProcessGroupNCCL.cpp:757] "
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, "
        f"OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600004 "
        "milliseconds before timing out."
    )


def steps(rank: int, count: int = 5) -> list[str]:
    return [
        f"[rank{rank}]: 2026-06-06 08:50:{i:02d} step {i} loss 2.5 tok/s 900" for i in range(count)
    ]


CAUSES = {
    "cuda-error": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "gpu-oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "gpu-hardware": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "user-error": "KeyError: 'lr'",
    "collective-mismatch": "RuntimeError: Detected mismatch between collectives on ranks. Rank 0",
    "coalesced-unsupported": "RuntimeError: Backend nccl does not support allgather_coalesced",
}


@pytest.mark.parametrize("class_", CAUSES)
@pytest.mark.parametrize("seed", range(4))
def test_one_cause_among_63_watchdogs_shuffled(class_: str, seed: int) -> None:
    rng = random.Random(seed)
    culprit = rng.randrange(64)
    cause = f"2026-06-06 08:59:01 [rank{culprit}]: {CAUSES[class_]}"
    echoes = [watchdog(rank, 9, rng.randrange(60)) for rank in range(64) if rank != culprit]
    lines = [line for rank in range(64) for line in steps(rank)]
    failures = [cause, *echoes]
    rng.shuffle(failures)
    report = classify_bytes("\n".join([*lines, *failures]).encode(), LOADED)
    assert (report.verdict.class_, report.verdict.rank) == (class_, culprit)
    assert report.verdict.rank_began_it
    assert report.evidence[0].line == len(lines) + failures.index(cause) + 1
    assert report.evidence[0].role == "cause"
    assert {item.role for item in report.evidence[1:]} == {"symptom"}
    assert not report.verdict.eligible or class_ == "gpu-hardware"


def write_ranks(folder: Path, logs: dict[int, list[str]]) -> Path:
    for rank, lines in logs.items():
        path = folder / "ranks" / str(rank) / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(lines) + "\n")
    return folder


def test_files_of_a_directory_are_merged_by_time(tmp_path: Path) -> None:
    """Both exceptions would do as a cause; the clock says which came first."""
    logs = {rank: [watchdog(rank, 20)] for rank in range(16)}
    logs[9] = ["2026-06-06 09:05:00,001 ERROR ValueError: bad sample in shard 9"]
    logs[2] = ["2026-06-06 09:06:00,001 ERROR ValueError: prefetcher is gone"]
    report = classify_paths([write_ranks(tmp_path, logs)], LOADED)
    assert (report.verdict.class_, report.verdict.rank) == ("user-error", 9)
    assert report.evidence[0].file.endswith("ranks/9/stderr.log")
    assert report.stats.files == 16


def test_a_traceback_without_any_time_beats_timed_watchdogs(tmp_path: Path) -> None:
    logs = {rank: [watchdog(rank, 20)] for rank in range(8)}
    logs[5] = ["Traceback (most recent call last):", '  File "train.py", line 3', "KeyError: 'lr'"]
    verdict = classify_paths([write_ranks(tmp_path, logs)], LOADED).verdict
    assert (verdict.class_, verdict.rank) == ("user-error", 5)


def test_a_dead_peer_is_not_a_network_fault(tmp_path: Path) -> None:
    """Rank 3 raises; 30 seconds later the others' InfiniBand retries are used up."""
    ib = (
        "[2026-06-06 09:01:{s:02d}] n{r}:57:59 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : "
        "Got completion from peer 10.0.0.3<33092> with status=12 opcode=0 len=0 vendor err 129"
    )
    logs = {rank: [ib.format(s=30 + rank, r=rank)] for rank in range(8)}
    logs[3] = ["[2026-06-06 09:01:00] starting", "[rank3]: IndexError: list index out of range"]
    verdict = classify_paths([write_ranks(tmp_path, logs)], LOADED).verdict
    assert (verdict.class_, verdict.rank) == ("user-error", 3)


def test_a_network_fault_is_not_the_exception_it_raises() -> None:
    log = f"{IB_LINE}\n[rank0]: RuntimeError: engine died, see above\n"
    assert classify_bytes(log.encode(), LOADED).verdict.class_ == "network-transport"


IB_LINE = (
    "n1:57:59 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer "
    "10.0.0.3<33092> with status=12 opcode=0 len=0 vendor err 129"
)


def test_ib_errors_ask_for_another_node_only_once_the_path_has_worked() -> None:
    fresh = classify_bytes(IB_LINE.encode(), LOADED).verdict
    assert (fresh.retry_policy, fresh.eligible) == ("fix-config", False)
    running = classify_bytes("\n".join([*steps(0), IB_LINE]).encode(), LOADED).verdict
    assert (running.retry_policy, running.eligible) == ("replace-node", True)


REFUSED = (
    "[2026-06-06 09:00:0{s}] n{r}:11:1{r} [{r}] misc/socket.cc:578 NCCL WARN socketPollConnect: "
    "connect to 10.0.0.9<36141> returned Connection refused, exceeded error retry count after 35 "
    "attempts"
)


def test_refused_at_start_is_retried_lazily() -> None:
    verdict = classify_bytes(REFUSED.format(s=1, r=1).encode(), LOADED).verdict
    assert (verdict.class_, verdict.phase) == ("bootstrap", "socket")
    assert (verdict.retry_policy, verdict.eligible) == ("retry-once-lazy", True)


def test_refused_after_steps_is_not_retried() -> None:
    verdict = classify_bytes(
        "\n".join([*steps(0), REFUSED.format(s=1, r=1)]).encode(), LOADED
    ).verdict
    assert verdict.class_ == "bootstrap" and not verdict.eligible
    assert "the job was past its start" in verdict.retry_reason


def test_refused_because_another_host_rejects_the_version_is_not_retried(tmp_path: Path) -> None:
    """The line that decides stands in the other host's log."""
    root = (
        "[2026-06-06 09:00:00] n0:24:27 [0] bootstrap.cc:345 NCCL WARN Bootstrap Root : mismatch "
        "in info from procs, nranks 16 vs 16, nroots 1 vs 1, iroot 0 vs 0, offset 0 vs 1305411586"
    )
    logs = {0: [root], **{rank: [REFUSED.format(s=rank, r=rank)] for rank in range(1, 8)}}
    report = classify_paths([write_ranks(tmp_path, logs)], LOADED)
    assert report.verdict.signature == "nccl-bootstrap-mismatch"
    assert (report.verdict.rank, report.verdict.eligible) == (0, False)


def test_two_nccl_versions_forbid_the_retry() -> None:
    log = "\n".join(
        [
            "n0:1:1 [0] NCCL INFO NCCL version 2.26.2+cuda12.2",
            "n1:1:1 [0] NCCL INFO NCCL version 2.29.7+cuda13.0",
            REFUSED.format(s=1, r=1),
        ]
    )
    verdict = classify_bytes(log.encode(), LOADED).verdict
    assert (verdict.class_, verdict.retry_policy) == ("bootstrap", "fix-config")
    assert "2.26.2, 2.29.7" in verdict.retry_reason


def test_another_firm_cause_forbids_the_retry() -> None:
    log = (
        REFUSED.format(s=1, r=1) + "\n[rank0]: ModuleNotFoundError: No module named 'flash_attn'\n"
    )
    assert not classify_bytes(log.encode(), LOADED).verdict.eligible


REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exit"


def test_remote_error_while_the_communicator_is_made_is_a_bootstrap_failure() -> None:
    frame = "frame #2: c10d::ProcessGroupNCCL::initNCCLComm(std::string const&) + 0x2a1"
    verdict = classify_bytes(f"[rank1]: {REMOTE}\n{frame}\n".encode(), LOADED).verdict
    assert (verdict.class_, verdict.retry_policy) == ("bootstrap", "retry-once-lazy")


INIT = "n1:4:4 [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 0 nranks 8 cudaDev 0 - Init {}"
IN_INIT = '[rank1]:   File "/opt/torch/distributed/distributed_c10d.py", line 1769, in {}'


@pytest.mark.parametrize(
    ("before", "is_start_up"),
    [
        pytest.param([IN_INIT.format("init_process_group")], True, id="in init_process_group"),
        pytest.param([IN_INIT.format("new_group")], True, id="in new_group"),
        pytest.param([IN_INIT.format("all_reduce")], False, id="in a collective"),
        pytest.param([INIT.format("START")], True, id="begun"),
        pytest.param([INIT.format("START"), INIT.format("COMPLETE")], False, id="done"),
        pytest.param(
            [INIT.format(what) for what in ("START", "COMPLETE", "START")],
            True,
            id="the second communicator is begun",
        ),
        pytest.param([INIT.format("START"), *steps(1)], False, id="outrun by a step"),
    ],
)
def test_a_remote_error_belongs_to_start_up_while_a_communicator_is_made(
    before: list[str], *, is_start_up: bool
) -> None:
    log = "\n".join([*before, f"[rank1]: {REMOTE}", ""])
    verdict = classify_bytes(log.encode(), LOADED).verdict
    assert verdict.class_ == ("bootstrap" if is_start_up else "peer-exit")
    assert verdict.eligible == is_start_up


def test_remote_error_of_a_running_job_is_a_peers_exit() -> None:
    running = "\n".join([*steps(1), f"[rank1]: {REMOTE}"])
    verdict = classify_bytes(running.encode(), LOADED).verdict
    assert (verdict.class_, verdict.eligible) == ("peer-exit", False)
    assert not verdict.rank_began_it


def test_a_start_up_warning_does_not_explain_an_exception() -> None:
    log = """\
[W socket.cpp:601] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111).
KeyError: 'lr'
"""
    assert classify_bytes(log.encode(), LOADED).verdict.class_ == "user-error"


def test_warnings_that_the_job_outlived_are_no_failure() -> None:
    log = "\n".join(
        [
            "n1:9:9 [0] NCCL WARN NET/OFI aws-ofi-nccl initialization failed",
            "Traceback (most recent call last):",
            "ImportError: cannot import name 'flash_attn_3'",
            "n1:9:9 [0] NCCL INFO comm 0x55 rank 0 nranks 8 cudaDev 0 busId 1000 - Init COMPLETE",
            *steps(0),
        ]
    )
    assert classify_bytes(log.encode(), LOADED).verdict.class_ == "no-failure-seen"


def test_an_attempt_that_was_followed_by_steps_is_history() -> None:
    log = [
        "[rank3]: torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "[default] Worker group FAILED. 2/3 attempts left; will restart worker group",
        *steps(0),
    ]
    assert classify_bytes("\n".join(log).encode(), LOADED).verdict.class_ == "no-failure-seen"
    log.append("[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    verdict = classify_bytes("\n".join(log).encode(), LOADED).verdict
    assert (verdict.class_, verdict.rank) == ("gpu-oom", 5)


def test_a_failure_without_a_restart_stays_one_though_others_log_on() -> None:
    log = [
        "[rank3]: torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        *steps(0),
    ]
    assert classify_bytes("\n".join(log).encode(), LOADED).verdict.class_ == "cuda-error"


def test_a_watchdog_while_compiling_and_one_after_it() -> None:
    compiling = '  File "/x/site-packages/torch/_inductor/codecache.py", line 1132, in load'
    during = f"{compiling}\n{watchdog(3, 9)}"
    assert classify_bytes(during.encode(), LOADED).verdict.class_ == "watchdog-compile"
    after = "\n".join([compiling, *steps(3), watchdog(3, 9)])
    assert classify_bytes(after.encode(), LOADED).verdict.class_ == "watchdog-timeout"


def test_the_rank_that_is_behind_is_named() -> None:
    def report(rank: int, enqueued: int) -> str:
        return (
            f"[rank{rank}]:[E1109 16:13:20.262386071 ProcessGroupNCCL.cpp:1785] [PG ID 1 PG GUID 1 "
            f"Rank {rank}]  failure detected by watchdog at work sequence id: 45 PG status: last "
            f"enqueued work: {enqueued}, last completed work: 44"
        )

    log = "\n".join(report(rank, 45 if rank == 6 else 47) for rank in range(8))
    verdict = classify_bytes(log.encode(), LOADED).verdict
    assert (verdict.class_, verdict.rank, verdict.rank_began_it) == ("watchdog-timeout", 6, True)


def asynchronous(rank: int, error: str, minute: int) -> str:
    """What torch's watchdog prints of an error that NCCL reports outside of any call."""
    begin = f"[rank{rank}]:[E606 09:{minute:02d}:20.2"
    return (
        f"{begin} ProcessGroupNCCL.cpp:645] [Rank {rank}] Collective WorkNCCL(SeqNum=45, "
        f"OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=60000) raised the following async "
        f"exception: NCCL error: {error}, NCCL version 2.29.7\n"
        f"{begin} ProcessGroupNCCL.cpp:2372] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure "
        "detected by watchdog at work sequence id: 45 PG status: last enqueued work: 47, last "
        "completed work: 44\n"
        f"{begin} ProcessGroupNCCL.cpp:1964] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received "
        "a dump signal due to a collective timeout from this local rank\n"
        f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated "
        f"with exception: NCCL error: {error}, NCCL version 2.29.7"
    )


def second_engine(rank: int, what: str) -> str:
    """The same of torch's second ProcessGroupNCCL; ``what`` ends the line."""
    return f"[rank{rank}]:[E1109 16:13:20.2 WorkNCCL.cpp:372] [TC][rank={rank}][name=0] {what}"


REMOTE = "remote process exited or there was a network error"
SYSTEM = "unhandled system error (run with NCCL_DEBUG=INFO for details)"
INTERNAL = "internal error - please report this issue to the NCCL developers"


@pytest.mark.parametrize(
    ("log", "class_"),
    [
        (asynchronous(1, REMOTE, 13), "peer-exit"),
        (asynchronous(1, SYSTEM, 13), "network-transport"),
        (asynchronous(1, INTERNAL, 13), "network-transport"),
        (second_engine(1, f"nccl hit async error on rank 1: {REMOTE}"), "peer-exit"),
        (second_engine(1, f"nccl hit async error on rank 1: {INTERNAL}"), "network-transport"),
        (second_engine(1, "Operation timed out after 60123 ms"), "watchdog-timeout"),
    ],
)
def test_the_watchdog_reports_errors_as_well_as_time_outs(log: str, class_: str) -> None:
    verdict = classify_bytes(log.encode(), LOADED).verdict
    assert (verdict.class_, verdict.rank, verdict.rank_began_it) == (class_, 1, False)


def test_an_abort_that_fails_is_no_failure_to_start() -> None:
    line = (
        "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with "
        "exception: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:418, "
        f"{INTERNAL}"
    )
    assert classify_bytes(line.encode(), LOADED).verdict.class_ == "network-transport"


def test_a_communicator_that_did_not_come_up_is_told_by_the_exception_alone() -> None:
    """Without NCCL's own log, and without the frames of torch."""
    where = "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:92"
    for begin in (
        f"DistBackendError: NCCL error in: {where},",
        "Failed to initialize NCCL communicator:",
    ):
        verdict = classify_bytes(
            f"[rank1]: torch.distributed.{begin} {REMOTE}".encode(), LOADED
        ).verdict
        assert (verdict.class_, verdict.retry_policy) == ("bootstrap", "retry-once-lazy")


@pytest.mark.parametrize(
    "quoted", ["assert loss < 1.0, why", "if step == 7: raise ValueError('loss')"]
)
def test_the_lines_that_a_traceback_quotes_are_no_steps(quoted: str) -> None:
    log = (
        "ValueError: it grew\nTraceback of the earlier iteration (most recent call last):\n"
        f'  File "/w/train.py", line 4, in check\n    {quoted}\n'
    )
    assert classify_bytes(log.encode(), LOADED).verdict.class_ == "user-error"


def test_time_outs_after_a_peer_has_gone_are_an_echo(tmp_path: Path) -> None:
    """And a peer that goes after a time-out is one of it."""
    died_first = write_ranks(
        tmp_path / "a", {2: [asynchronous(2, REMOTE, 13)], 5: [watchdog(5, 23)]}
    )
    report = classify_paths([died_first], LOADED)
    assert (report.verdict.class_, report.verdict.rank) == ("peer-exit", 2)
    hung_first = write_ranks(
        tmp_path / "b", {2: [asynchronous(2, REMOTE, 13)], 5: [watchdog(5, 3)]}
    )
    report = classify_paths([hung_first], LOADED)
    assert (report.verdict.class_, report.verdict.rank) == ("watchdog-timeout", 5)


@pytest.mark.parametrize(("ended", "cause"), [(3, (3, True)), (1, (1, False))])
def test_of_peers_that_go_the_one_is_named_that_ended_and_saw_none_go(
    ended: int, cause: tuple[int, bool]
) -> None:
    scanner = Scanner(LOADED)
    scanner.feed(1, "stderr.log", asynchronous(1, REMOTE, 13).encode())
    scanner.add_exit(ended, code=1)
    verdict = scanner.verdict().verdict
    assert (verdict.class_, verdict.rank, verdict.rank_began_it) == ("peer-exit", *cause)


def test_the_rank_a_line_accuses_is_named_not_its_writer() -> None:
    line = "[rank0]: RuntimeError: [Rank 0]: Ranks 5 failed to pass monitoredBarrier in 60000 ms"
    assert classify_bytes(line.encode(), LOADED).verdict.rank == 5


ELASTIC = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  time      : 2026-06-21_21:36:53
  rank      : 1 (local_rank: 1)
  exitcode  : -6 (pid: 11)
  traceback : Signal 6 (SIGABRT) received by PID 11
Root Cause (first observed failure):
[0]:
  time      : 2026-06-21_21:36:52
  rank      : 6 (local_rank: 6)
  exitcode  : {code} (pid: 10)
"""


@pytest.mark.parametrize(
    ("code", "class_"),
    [
        (-9, "host-oom"),
        (-7, "host-oom"),
        (-11, "process-crash"),
        (1, "peer-exit"),
        (-6, "process-crash"),  # nothing but aborts: no rank that another one waited for
    ],
)
def test_a_summary_of_torchelastic_alone(code: int, class_: str) -> None:
    verdict = classify_bytes(ELASTIC.format(code=code).encode(), LOADED).verdict
    assert (verdict.class_, verdict.rank) == (class_, 6)
    assert not verdict.eligible


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank3]: {cause}", 3),
        ("[default3]:{cause}", 3),
        ("3: {cause}", 3),
        ("[1,3]<stderr>:{cause}", 3),
        (" 3: [rank7]: {cause}", 7),
        ("[Rank 3] {cause}", 3),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 3] {cause}", 3),
        ("2026-06-06 10:00:00 {cause}", None),
    ],
)
def test_rank_prefixes(line: str, rank: int | None) -> None:
    cause = "RuntimeError: CUDA error: an illegal memory access was encountered"
    report = classify_bytes(line.format(cause=cause).encode(), LOADED)
    assert report.verdict.rank == rank


def test_nccl_lines_get_their_rank_from_the_communicator() -> None:
    log = b"""\
n1:48:66 [3] NCCL INFO ncclCommInitRank comm 0x55d0c0 rank 11 nranks 16 cudaDev 3 - Init START
n1:48:99 [3] NCCL INFO ncclCommInitRank comm 0x55d0c1 rank 1 nranks 2 cudaDev 3 - Init START
n1:48:66 [3] init.cc:943 NCCL WARN Cuda failure 'an illegal memory access was encountered'
"""
    assert classify_bytes(log, LOADED).verdict.rank == 11


@pytest.mark.parametrize(("has_stepped", "policy"), [(False, "fix-config"), (True, "replace-node")])
def test_the_launcher_knows_of_steps_that_no_log_shows(has_stepped: bool, policy: str) -> None:
    """A script may report them by receipts, and print none."""
    scanner = Scanner(LOADED)
    if has_stepped:
        scanner.add_steps()
    line = "NET/IB: Got completion from peer 10.0.0.2<1> with status=12 opcode=0 len=0"
    scanner.feed(1, "stderr", f"{line}\n".encode())
    assert scanner.verdict().verdict.retry_policy == policy


def test_the_launcher_knows_whether_the_first_collective_has_completed() -> None:
    """Without a frame of the set-up in the log, only the caller knows the phase."""
    scanner = Scanner(LOADED)
    scanner.feed(1, "stderr", f"[rank1]: {REMOTE}\nRuntimeError: giving up\n".encode())
    unknown, starting, running = (
        scanner.verdict(starting_up=phase).verdict for phase in (None, True, False)
    )
    assert (unknown.class_, unknown.eligible) == ("peer-exit", False)
    assert (starting.class_, starting.retry_policy) == ("bootstrap", "retry-once-lazy")
    assert (running.class_, running.eligible) == ("peer-exit", False)
    scanner = Scanner(LOADED)
    scanner.feed(1, "stderr", REFUSED.format(s=1, r=1).encode())
    assert scanner.verdict(starting_up=True).verdict.eligible
    assert not scanner.verdict(starting_up=False).verdict.eligible


def test_the_exception_after_a_refused_connection_does_not_forbid_the_retry() -> None:
    after = f"{REFUSED.format(s=1, r=1)}\nRuntimeError: could not start\n"
    assert classify_bytes(after.encode(), LOADED).verdict.eligible
    before = f"RuntimeError: no data\n{REFUSED.format(s=1, r=1)}\n"
    assert not classify_bytes(before.encode(), LOADED).verdict.eligible


def test_the_exception_of_another_rank_forbids_the_retry(tmp_path: Path) -> None:
    """Rank 1 is refused because rank 0 never came up; that it said so later changes nothing."""
    logs = {1: [REFUSED.format(s=1, r=1)], 0: ["2026-06-06 09:00:30 ERROR KeyError: 'lr'"]}
    verdict = classify_paths([write_ranks(tmp_path, logs)], LOADED).verdict
    assert (verdict.class_, verdict.eligible) == ("bootstrap", False)
    assert "python-exception" in verdict.retry_reason


def test_live_lines_are_dated_by_their_arrival() -> None:
    """Of two ranks whose exceptions bear no time, the one that wrote first began it."""
    now = datetime(2026, 6, 6, 9, 0, 0)
    scanner = Scanner(LOADED, clock=lambda: now)
    scanner.feed(0, "stderr", b"starting\n")
    scanner.feed(5, "stderr", b"ValueError: bad sample\n")
    now += timedelta(seconds=2)
    scanner.feed(0, "stderr", b"ValueError: peer is gone\n")
    assert scanner.verdict().verdict.rank == 5


def test_live_streams_are_one_job() -> None:
    scanner = Scanner(LOADED)
    for rank in range(8):
        scanner.feed(rank, "stdout", "\n".join(steps(rank)).encode() + b"\n")
    scanner.feed(
        5, "stderr", b"RuntimeError: CUDA error: an illegal memory access was encountered\n"
    )
    report: Report = scanner.verdict()
    assert (report.verdict.class_, report.verdict.rank) == ("cuda-error", 5)
    assert report.evidence[0].file == "stderr"


def test_silence_is_unknown_and_start_up_is_only_half_healthy() -> None:
    assert classify_bytes(b"", LOADED).verdict.exit_code == 12
    started = classify_bytes(b"n1:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n", LOADED)
    assert (started.verdict.class_, started.verdict.confidence) == ("no-failure-seen", 0.6)
    ran = classify_bytes("\n".join(steps(0)).encode(), LOADED)
    assert (ran.verdict.class_, ran.verdict.confidence) == ("no-failure-seen", 0.9)


IB_OFF = "n1:22:22 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1."
SOCKETS = "n1:22:22 [0] NCCL INFO Using network Socket"
TWO_NODES = "n1:22:90 [0] NCCL INFO comm 0x55d0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0"
OLDER = "n1:22:90 [0] NCCL INFO comm 0x55d0 rank 0 nranks 16 cudaDev 0 busId 1b000 - Init COMPLETE"
ONE_NODE = "n1:22:90 [0] NCCL INFO comm 0x55d0 rank 0 nRanks 8 nNodes 1 localRanks 8 localRank 0"
WIDE_NODE = "n1:22:90 [0] NCCL INFO comm 0x55d0 rank 0 nRanks 16 nNodes 1 localRanks 16 localRank 0"
CHOSEN = "n1:22:22 [0] NCCL INFO NCCL_NET set by environment to Socket."
PLUGIN = "n1:22:22 [0] NCCL INFO Using network AWS Libfabric"
TRAINED = ["training done"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([IB_OFF, SOCKETS, TWO_NODES], True),
        ([IB_OFF, SOCKETS, OLDER], True),
        (["NET/IB : IB disabled", SOCKETS, OLDER], True),
        ([IB_OFF, SOCKETS, TWO_NODES, ONE_NODE], True),  # a smaller group, within a node
        ([IB_OFF, SOCKETS, ONE_NODE], False),
        ([IB_OFF, SOCKETS, OLDER, WIDE_NODE], False),
        ([SOCKETS, TWO_NODES], False),  # a cluster without InfiniBand
        ([IB_OFF, TWO_NODES], False),
        ([IB_OFF, CHOSEN, SOCKETS, TWO_NODES], False),
        ([IB_OFF, PLUGIN, TWO_NODES], False),
    ],
)
def test_infiniband_that_a_single_node_setting_keeps_off(lines: list[str], found: bool) -> None:
    log = "\n".join([*lines, *steps(0), *TRAINED]).encode()
    verdict = classify_bytes(log, LOADED).verdict
    assert (verdict.signature == "ib-off-on-several-nodes") == found
    if found:
        assert (verdict.class_, verdict.retry_policy) == ("plugin-env", "fix-config")


@pytest.mark.parametrize("line", ["KeyError: 'lr'", watchdog(3, 1)])
def test_how_a_job_ran_yields_to_what_made_it_fail(line: str) -> None:
    log = "\n".join([IB_OFF, SOCKETS, TWO_NODES, *steps(0), line]).encode()
    assert classify_bytes(log, LOADED).verdict.class_ in ("user-error", "watchdog-timeout")
    exited = Scanner(signatures=LOADED)
    exited.feed(0, "ranks/0/stderr.log", "\n".join([IB_OFF, SOCKETS, TWO_NODES, ""]).encode())
    exited.add_exit(0, code=1, signal=None)
    assert exited.verdict().verdict.signature != "ib-off-on-several-nodes"


def test_shapes_that_differ_are_no_uneven_split() -> None:
    manual = (
        "    work = default_pg.allreduce([tensor], opts)\n"
        "RuntimeError: Error when verifying shape tensors for collective ALLREDUCE on rank 0. This"
        " likely indicates that input shapes into the collective are mismatched across ranks. Got"
        " shapes:  10\n[ torch.LongTensor{1} ]\n"
    )
    verdict = classify_bytes(manual.encode(), LOADED).verdict
    assert (verdict.class_, verdict.signature) == ("collective-mismatch", "shapes-differ")
    assert verdict.confidence > 0.9
    assert verdict.retry_policy == "fix-code"


DLVSYM = "n1:9:9 [0] NCCL INFO dlvsym failed on mlx5dv_get_data_direct"
PROBE = f"{DLVSYM} - /lib/libmlx5.so: undefined symbol: mlx5dv_get_data_direct, version MLX5_1.25"


def test_harmless_warnings_alone_are_benign_and_each_is_explained() -> None:
    report = classify_bytes(f"{PROBE}\n{PROBE}\n".encode(), LOADED)
    assert report.verdict.class_ == "benign"
    assert (report.verdict.exit_code, report.verdict.shows_failure) == (0, False)
    assert [(line.line, line.role) for line in report.evidence] == [(1, "benign")]
    (note,) = report.notes
    known = LOADED.by_id["benign-dlvsym"]
    assert note.endswith(f":1 is harmless: {known.summary} ({known.condition})")


def test_of_a_job_that_ran_no_log_says_that_it_is_healthy() -> None:
    report = classify_bytes("\n".join([PROBE, *steps(0)]).encode(), LOADED)
    assert report.verdict.class_ == "no-failure-seen"
    assert "no failure seen" in report.verdict.summary
    assert "receipt check" in report.verdict.summary
    assert len(report.notes) == 1


@pytest.mark.parametrize("hour", ["09", "02"], ids=["one zone", "writers in two zones"])
def test_a_step_before_a_failure_in_one_log_does_not_hide_it(hour: str) -> None:
    """torch's stamps name no year, and may be of another zone than the program's own."""
    lost = (
        f"[rank5]:[E606 {hour}:10:09.1 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0 Rank 5] "
        "Process group watchdog thread terminated with exception: NCCL error: remote process "
        "exited or there was a network error, NCCL version 2.27.7"
    )
    report = classify_bytes("\n".join([*steps(0), lost]).encode(), LOADED)
    assert (report.verdict.class_, report.verdict.rank) == ("peer-exit", 5)


@pytest.mark.parametrize(
    "line",
    [
        "W0102 10:00:00.1 7 dynamic_rendezvous.py:1346] The node 'h7_1_0' has failed to send a "
        "keep-alive heartbeat to the rendezvous 'r7' due to an error of type RendezvousStateError.",
        "n1:7:9 [0] alloc.cc:77 NCCL WARN Cuda failure 1 'invalid argument'",
        "RuntimeError: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    ],
)
def test_weak_evidence_does_not_speak_loudly(line: str) -> None:
    verdict = classify_bytes(f"{line}\n".encode(), LOADED).verdict
    assert verdict.class_ != "user-error" and 0.5 < verdict.confidence < 0.75


FINAL_METRICS = """\
***** eval metrics *****
  eval_runtime            = 0:00:07.77
  eval_samples_per_second =     77.7
"""
CLOSING = """\
n1:7:9 [0] NCCL INFO misc/socket.cc:77 -> 3
n1:7:9 [0] NCCL INFO transport/net.cc:77 -> 3
n1:7:9 [0] NCCL INFO comm 0x7 rank 0 nranks 2 cudaDev 0 busId 1e0 - Abort COMPLETE
"""


@pytest.mark.parametrize("end", [FINAL_METRICS, "Training completed\n"])
def test_traces_and_aborts_after_the_end_are_of_teardown(end: str) -> None:
    verdict = classify_bytes(f"{end}{CLOSING}".encode(), LOADED).verdict
    assert (verdict.class_, verdict.confidence) == ("no-failure-seen", 0.9)
    assert classify_bytes(f"{CLOSING}{end}".encode(), LOADED).verdict.names_failure
    failure = "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    late = classify_bytes(f"{end}{CLOSING}{failure}".encode(), LOADED).verdict
    assert late.class_ == "cuda-error"


def test_metrics_of_training_are_no_end_while_the_evaluation_is_to_come() -> None:
    log = f"  train_runtime            = 0:07:07.77\n{CLOSING}"
    assert classify_bytes(log.encode(), LOADED).verdict.class_ == "peer-exit"


def test_a_refused_socket_may_be_tried_again_where_its_retries_are_said_to_be_used_up() -> None:
    refused = "n1:48:66 [1] include/socket.h:403 NCCL WARN Connect to 10.1.3.2<7> failed : "
    refused += "Connection refused"
    gave_up = "n1:48:66 [1] misc/socket.cc:77 NCCL WARN socketStartConnect: exceeded retries (7)"
    verdict = classify_bytes(f"{refused}\n{gave_up}\n".encode(), LOADED).verdict
    assert (verdict.class_, verdict.retry_policy) == ("bootstrap", "retry-once-lazy")
    verdict = classify_bytes(f"{gave_up}\n".encode(), LOADED).verdict
    assert (verdict.class_, verdict.retry_policy) == ("bootstrap", "fix-config")
