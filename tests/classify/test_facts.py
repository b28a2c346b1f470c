"""What is known as a value, and not by a line: how a process ended, a hang that was found."""

from __future__ import annotations

import pytest

from ncclops.classify import Scanner
from ncclops.classify.loader import parse_signatures
from ncclops.errors import UsageError

SIGNATURE = """
[[signature]]
id = "mine"
class = "user-error"
role = "cause"
literals = ["none of it"]
{}
retry = "fix-code"
summary = "it is mine"
remedy = ["look"]
examples = ["none of it"]
near_misses = ["some of it"]
"""


@pytest.mark.parametrize(
    ("code", "signal", "class_", "signature"),
    [
        (1, None, "peer-exit", "elastic-exit-1"),
        (137, None, "peer-exit", "elastic-exit-1"),
        (None, "SIGKILL", "host-oom", "elastic-exit-9"),
        (None, "SIGBUS", "host-oom", "elastic-exit-7"),
        (None, "SIGSEGV", "process-crash", "elastic-exit-11"),
        (None, "SIGILL", "process-crash", "elastic-exit-11"),
        (None, "SIGFPE", "process-crash", "elastic-exit-11"),
        (None, "SIGABRT", "peer-exit", "elastic-exit-6"),
        (None, "SIGTERM", "peer-exit", "elastic-exit-15"),
        (None, "SIGTRAP", "process-crash", "elastic-exit-11"),
        (None, "SIGHUP", "process-crash", "ended-by-other-signal"),
        (None, "SIGUSR1", "preempted", "ended-by-warning-signal"),
        (None, "SIGPROF", "user-error", "ended-by-timer"),
        (None, "SIGXCPU", "user-error", "ended-by-limit"),
        (None, "SIGSTKFLT", "process-crash", "ended-by-other-signal"),
        (None, "signal 40", "process-crash", "ended-by-other-signal"),
    ],
)
def test_an_exit_alone_is_classified(
    code: int | None, signal: str | None, class_: str, signature: str
) -> None:
    scanner = Scanner()
    scanner.add_exit(3, code=code, signal=signal)
    report = scanner.verdict()
    assert (report.verdict.class_, report.verdict.signature) == (class_, signature)
    assert report.verdict.rank == 3
    (evidence,) = report.evidence
    assert (evidence.file, evidence.line, evidence.rank) == ("exit status", 1, 3)
    assert evidence.text.startswith("rank 3 ")


def test_nothing_is_to_be_changed_first_for_a_kill_of_which_nothing_says_by_whom() -> None:
    """An operator or a scheduler may have done it; where the kernel has, a line of it says so."""
    killed, by_the_kernel = Scanner(), Scanner()
    killed.add_exit(3, code=None, signal="SIGKILL")
    assert killed.verdict().verdict.retry_policy == "none"
    by_the_kernel.feed(3, "dmesg", b"Out of memory: Killed process 4711 (python) total-vm:1024kB\n")
    assert by_the_kernel.verdict().verdict.retry_policy == "fix-config"


@pytest.mark.parametrize(("rank", "class_"), [(1, "network-transport"), (0, "process-crash")])
def test_a_crash_of_a_process_that_had_failed_before_is_no_cause(rank: int, class_: str) -> None:
    """What dumps the stacks after an abort may crash itself. Of another rank it says nothing."""
    failed = (
        "[rank1]:[E606 09:09:08.3 ProcessGroupNCCL.cpp:645] [Rank 1] Collective WorkNCCL(SeqNum=7)"
        " raised the following async exception: NCCL error: internal error\n"
    )
    scanner = Scanner()
    scanner.feed(1, "ranks/1/stderr.log", failed.encode())
    scanner.add_exit(rank, signal="SIGSEGV")
    assert scanner.verdict().verdict.class_ == class_


def test_a_signal_leads_over_what_its_peers_lost_and_over_the_steps_before() -> None:
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:45454."
    scanner = Scanner()
    scanner.feed(0, "stdout", b"".join(b"step %d loss 0.1\n" % step for step in range(20)))
    scanner.feed(0, "stderr", f"[rank0]: {lost}\n".encode())
    scanner.add_exit(1, signal="SIGUSR1")
    scanner.add_exit(0, code=1)
    verdict = scanner.verdict().verdict
    assert (verdict.class_, verdict.rank, verdict.rank_began_it) == ("preempted", 1, True)


def test_a_scripts_own_watchdog_leads_over_what_its_peers_lost_and_over_nothing_else() -> None:
    lost = b"[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:45454.\n"
    dumped = b'Timeout (0:00:05)!\nThread 0x7f (most recent call first):\n  File "t.py", line 9\n'
    ended, failed = Scanner(), Scanner()
    for scanner in (ended, failed):
        scanner.feed(0, "r0", lost)
        scanner.feed(1, "r1", dumped)
        scanner.add_exit(1, code=1)
    failed.feed(2, "r2", b"[rank2]: KeyError: 'lr'\n")
    verdict = ended.verdict().verdict
    assert (verdict.class_, verdict.rank) == ("watchdog-timeout", 1)
    assert failed.verdict().verdict.class_ == "user-error"


def test_an_end_that_proves_nothing_is_unknown_and_no_empty_input() -> None:
    scanner = Scanner()
    scanner.add_exit(0, code=0)
    verdict = scanner.verdict().verdict
    assert verdict.class_ == "unknown"
    assert "empty" not in verdict.summary
    assert "empty" in Scanner().verdict().verdict.summary


def test_what_the_rank_wrote_explains_how_it_ended() -> None:
    scanner = Scanner()
    scanner.feed(1, "stderr", b"torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n")
    scanner.add_exit(1, code=1)
    assert scanner.verdict().verdict.class_ == "gpu-oom"


def test_a_segfault_leads_over_the_peers_that_it_took_along() -> None:
    scanner = Scanner()
    scanner.add_exit(0, code=1)
    scanner.add_exit(1, signal="SIGSEGV")
    verdict = scanner.verdict().verdict
    assert (verdict.class_, verdict.rank) == ("process-crash", 1)


@pytest.mark.parametrize("reason", ["rank 1: step counter stale for more than 30m", "any words"])
def test_a_hang_is_known_whatever_its_reason_says(reason: str) -> None:
    scanner = Scanner()
    scanner.add_hang(1, reason)
    report = scanner.verdict()
    assert report.verdict.signature == "ncclops-hang"
    assert (report.verdict.class_, report.verdict.rank) == ("watchdog-timeout", 1)
    assert [(each.file, each.text) for each in report.evidence] == [("hang watch", reason)]


def test_what_a_rank_prints_whose_groups_are_aborted_is_not_why_it_hung() -> None:
    scanner = Scanner()
    scanner.feed(0, "stderr", b"ValueError: Default process group has not been initialized\n")
    scanner.add_hang(0, "all ranks wait in a collective")
    assert scanner.verdict().verdict.signature == "ncclops-hang"


def test_a_sites_own_signature_may_claim_an_exit_code() -> None:
    (mine,) = parse_signatures(SIGNATURE.format("exits = [77, 'SIGUSR2']"), "mine.toml")
    assert mine.exits == {"77", "SIGUSR2"}
    assert not mine.hang


@pytest.mark.parametrize(
    "line", ["exits = [0]", "exits = [256]", "exits = ['SIGNAL']", "exits = 77", "hang = 1"]
)
def test_what_is_no_exit_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match=r"signature 'mine': (exits must be|hang must be)"):
        parse_signatures(SIGNATURE.format(line), "mine.toml")
