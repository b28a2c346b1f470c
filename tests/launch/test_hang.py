"""Ranks that hang are found on two kinds of evidence and dealt with; slow ones are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText
from tests.freezing import frozen_group
from tests.lanes import IN_SCRIPT, Lane, lanes
from tests.launch.conftest import Run

Ncclops = Callable[..., CompletedText]
Script = Callable[[str], Path]
OnlyRun = Callable[[], Run]

# The timeouts of the restart core stay at their minutes: what acts within seconds is the watch.
IMPATIENT = """
description = "For tests: short windows."
extends = "{lane}"
[timeouts]
stop_grace = "3s"
[watch]
hang = "3s"
quiet = "4s"
"""

TRAINING = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from ncclops import receipt
dist.init_process_group(**lane)
rank = dist.get_rank()

def once(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def burn(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))

for n in range(12):
    if n == AT and os.environ["RANK"] == "VICTIM" and once("faulted"):
        FAULT
    dist.all_reduce(torch.ones(10, device=device))
    receipt.step(n)
receipt.end()
world_size = dist.get_world_size()
dist.destroy_process_group()  # NCCL waits only here
print("ended", world_size)
"""


@pytest.fixture
def impatient(tmp_path: Path, lane: Lane) -> Path:
    path = tmp_path / "impatient.toml"
    path.write_text(IMPATIENT.format(lane=lane.profile))
    return path


@pytest.fixture
def train(
    ncclops: Ncclops, script: Script, only_run: OnlyRun, impatient: Path
) -> Callable[..., tuple[CompletedText, Run]]:
    """``train(fault, restart=…)`` runs two ranks, one of which does ``fault`` before a step."""

    def run(
        fault: str, restart: str = "in-process", rank: int = 1, at: int = 6
    ) -> tuple[CompletedText, Run]:
        options = ("--profile", impatient, "--nproc-per-node", "2", "--restart", restart)
        source = TRAINING.replace("FAULT", fault).replace("VICTIM", str(rank))
        path = script(IN_SCRIPT + source.replace("AT", str(at)))
        return ncclops("launch", *options, "--warm-start", path), only_run()

    return run


Train = Callable[..., tuple[CompletedText, Run]]


@lanes("nccl", extended=("gloo",))
@pytest.mark.slow
def test_a_rank_that_sleeps_is_interrupted_and_comes_along(train: Train) -> None:
    done, run = train("time.sleep(600)")
    assert done.returncode == 0, done.stderr
    (hang,) = run.named("hang")
    assert hang["culprits"] == [1]
    assert hang["action"] == "restart in place"
    (culprit,) = (each for each in hang["evidence"] if each["rank"] == 1)
    assert {"step counter", "CPU time"} <= set(culprit["stale"])
    (restart,) = run.named("restart")
    assert (restart["faulty_ranks"][0], restart["ranks_lost"]) == (1, [])
    (fault,) = run.named("fault")
    assert (fault["rank"], fault["kind"]) == (1, "hung")
    assert [run.stdout(rank) for rank in range(2)] == ["ended 2\n"] * 2


ENDS_EARLY = """
import sys
from pathlib import Path
import torch.distributed as dist
from ncclops import receipt
dist.init_process_group(**lane)
for n in range(12):
    if n == 6 and dist.get_rank() == 1 and not Path("ended").exists():
        Path("ended").touch()
        sys.exit(0)
    summed = torch.ones(1, device=device)
    dist.all_reduce(summed)
    summed.item()
    receipt.step(n)
print("ended", dist.get_world_size())
dist.destroy_process_group()
"""


@lanes("nccl")
@pytest.mark.slow
@pytest.mark.extended
def test_a_rank_on_which_the_script_ends_too_early_is_named_and_comes_along(
    ncclops: Ncclops, script: Script, only_run: OnlyRun, impatient: Path
) -> None:
    """NCCL tells the others nothing of it: by themselves they would wait for ever."""
    options = ("--profile", impatient, "--nproc-per-node", "2")
    done = ncclops("launch", *options, script(IN_SCRIPT + ENDS_EARLY))
    run = only_run()
    assert done.returncode == 0, done.stderr
    (hang,) = run.named("hang")
    assert hang["culprits"] == [1]
    assert "did not come to: the script has ended there" in hang["cause"]
    (restart,) = run.named("restart")
    assert (restart["faulty_ranks"][0], restart["ranks_lost"]) == (1, [])
    assert [run.stdout(rank) for rank in range(2)] == ["ended 2\n"] * 2


@lanes("nccl", extended=("gloo",))
@pytest.mark.slow
def test_a_rank_that_keeps_the_gil_is_ended_and_the_others_go_on(train: Train) -> None:
    done, run = train("ctypes.PyDLL(None).sleep(600)")
    assert done.returncode == 0, done.stderr
    assert [hang["action"] for hang in run.named("hang")][:2] == ["wake it", "restart in place"]
    assert run.named("hang")[0]["culprits"] == [1]
    (ended,) = run.named("hang-ended")
    assert ended["rank"] == 1
    assert run.stdout(0) == "ended 1\n"
    assert "rank 1 was killed by SIGKILL, the others went on" in run.reason


@pytest.mark.slow
@pytest.mark.extended
def test_a_rank_that_sigkill_does_not_end_is_not_waited_for(train: Train) -> None:
    with frozen_group() as group:
        done, run = train(
            f"group = Path({str(group)!r});"
            "(group / 'cgroup.procs').write_text(str(os.getpid()));"
            "(group / 'freezer.state').write_text('FROZEN')"
        )
    assert done.returncode == 0, done.stderr
    assert run.stdout(0) == "ended 1\n"
    assert {tuple(hang["culprits"]) for hang in run.named("hang")} == {(1,)}
    assert run.reason == "rank 1 did not end, the others went on; 1 worker exited 0"
    assert run.verdict["ranks_lost"] == [1]
    assert "processes that SIGKILL did not end" in done.stderr


@pytest.mark.slow
@pytest.mark.extended
def test_a_rank_that_does_not_leave_the_script_is_ended(
    ncclops: Ncclops, script: Script, only_run: OnlyRun, tmp_path: Path
) -> None:
    """Python runs, and the command to restart comes; the text of what was raised takes for ever."""
    profile = tmp_path / "impatient.toml"
    # A restart is waited for as long as all its timeouts together.
    limits = '"3s"\nprocess_group = "6s"\nheartbeat = "5s"\nabort = "1s"\n[watch]'
    profile.write_text(IMPATIENT.format(lane="local-cpu").replace('"3s"\n[watch]', limits))
    source = """
import os, time
import torch, torch.distributed as dist
class Endless(Exception):
    def __str__(self):
        time.sleep(600)
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    raise Endless
dist.all_reduce(torch.ones(1))
"""
    ncclops("launch", "--profile", profile, "--nproc-per-node", "2", script(source))
    run = only_run()
    (ended,) = run.named("hang-ended")
    assert ended["rank"] == 1
    hangs = run.named("hang")  # by what is seen of it, the rank that waits for this one hangs, too
    assert (hangs[0]["action"], hangs[-1]["action"]) == ("restart in place", "end it")
    assert all(1 in hang["culprits"] for hang in hangs)
    assert "rank 1 was killed by SIGKILL, the others went on" in run.reason


@lanes("nccl", extended=("gloo",))
@pytest.mark.slow
@pytest.mark.extended
def test_a_rank_that_was_stopped_gets_sigcont_and_goes_on(train: Train) -> None:
    done, run = train("os.kill(os.getpid(), signal.SIGSTOP)")
    assert done.returncode == 0, done.stderr
    assert (run.named("hang")[0]["culprits"], run.named("hang")[0]["action"]) == ([1], "wake it")
    assert run.named("restart") == []
    assert [run.stdout(rank) for rank in range(2)] == ["ended 2\n"] * 2


@lanes("nccl-eager", extended=("gloo",))
@pytest.mark.slow
def test_without_restart_in_place_the_attempt_has_failed_and_the_policy_decides(
    train: Train,
) -> None:
    done, run = train("time.sleep(600)", restart="process")
    assert done.returncode == 1
    verdict = run.verdict
    assert verdict["outcome"] == "failed"
    assert verdict["reason"].startswith("hang: ")
    assert "rank 1: step counter" in verdict["reason"]
    assert verdict["first_failure"]["rank"] == 1
    assert verdict["classification"]["class"] == "watchdog-timeout"
    assert verdict["classification"]["signature"] == "ncclops-hang"
    (fault,) = run.named("fault")
    assert (fault["rank"], fault["cause"].startswith("hung: ")) == (1, True)
    assert run.named("stop-forced")[0]["reason"] == "rank 1 hangs"
    story = verdict["story"]
    assert (story["rank"], story["class"], story["tried"]) == (1, "watchdog-timeout", [])
    assert "time.sleep(600)" in story["code"][-1]["text"]
    assert story["operation"].startswith("all_reduce")
    assert story["stopped"]
    assert story["next_command"].startswith("ncclops incident ")


@lanes("nccl", extended=("gloo",))
@pytest.mark.slow
@pytest.mark.extended
def test_a_first_step_that_compiles_for_three_windows_is_left_alone(train: Train) -> None:
    done, run = train("time.sleep(10)", at=0)
    assert done.returncode == 0, done.stderr
    assert run.named("hang") == []
    assert run.named("restart") == []
    assert run.verdict["receipt"]["verdict"] == "healthy"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            "burn(10)",
            id="an evaluation that was not declared uses its CPU",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "with receipt.phase('checkpoint', limit='60s'): time.sleep(10)",
            id="a declared checkpoint sleeps",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_who_is_only_slow_is_left_alone(train: Train, fault: str) -> None:
    done, run = train(fault, rank=0)
    assert done.returncode == 0, done.stderr
    assert run.named("hang") == []
    assert run.named("restart") == []
    assert run.verdict["receipt"]["verdict"] == "healthy"
