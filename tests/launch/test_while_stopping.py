"""While a run is stopping, or an attempt is ending, nothing starts again, whatever happens."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, CompletedText, free_port
from tests.lanes import GLOO, IN_SCRIPT, Lane, lanes
from tests.launch.conftest import Background, Run

pytestmark = pytest.mark.slow

Script = Callable[[str], Path]
Start = Callable[..., Background]
Ncclops = Callable[..., CompletedText]


HANGS = f"""{IN_SCRIPT}
import time
import torch.distributed as dist
from ncclops import receipt
dist.init_process_group(**lane)
for n in range(10**9):
    if n == 15 and dist.get_rank() == 1:
        open("hangs", "w").close()
        time.sleep(10000)
    dist.all_reduce(torch.ones(100, device=device))
    receipt.step(n)
"""


def fails_while_stopping(how: str, receipts: Path) -> str:
    """The last rank fails within its part of the stop, once rank 0 has done its own."""
    return f"""{IN_SCRIPT}
import pathlib, signal, time
import torch.distributed as dist
from ncclops import receipt
how, receipts = {how!r}, pathlib.Path({str(receipts)!r})
dist.init_process_group(**lane)
rank, size = dist.get_rank(), dist.get_world_size()
open("starts", "a").write("x")
@receipt.on_stop
def save():
    if rank == 0: return
    if rank < size - 1: time.sleep(1000)
    while '"stopped"' not in receipts.read_text(): time.sleep(0.01)
    if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no space left")
for n in range(10**9):
    dist.all_reduce(torch.ones(100, device=device))
    time.sleep(0.01)
    receipt.step(n)
    if n == 5: open("trains", "w").close()
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not appear"
        time.sleep(0.02)  # no event: another process's file


@pytest.mark.parametrize(
    ("lane", "how", "restart", "said"),
    [
        pytest.param(
            *("gloo", "killed", "in-process", "rank 2 failed meanwhile (was killed by SIGKILL)"),
            marks=pytest.mark.extended,
        ),
        ("nccl", "raises", "in-process", "rank 2 failed meanwhile (ValueError: no space left)"),
        pytest.param(
            *("gloo", "raises", "process", "rank 2 failed meanwhile (ValueError: no space left)"),
            marks=pytest.mark.extended,
        ),
    ],
    indirect=["lane"],
)
def test_a_fault_while_the_run_is_stopping_is_recorded_and_the_job_only_ends(
    background: Start, script: Script, tmp_path: Path, lane: Lane, how: str, restart: str, said: str
) -> None:
    launcher = background(
        *("launch", "--profile", lane.profile, "--nproc-per-node", "3", "--run-dir", "run"),
        *("--restart", restart, "--max-restarts", "2"),
        script(fails_while_stopping(how, tmp_path / "run/ranks/0/receipt.jsonl")),
    )
    wait_for(tmp_path / "trains")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    run = Run(tmp_path / "run")
    assert (tmp_path / "starts").read_text() == "xxx"
    assert run.named("restart") == run.named("retry") == run.named("escalation") == []
    assert run.verdict["outcome"] == "interrupted"
    assert run.verdict["reason"].startswith(f"stopped by SIGTERM; {said}")
    assert run.verdict["first_failure"]["rank"] == 2
    assert run.verdict["workers"][0]["exit_code"] == 0, "it had done its part"
    assert [fault["rank"] for fault in run.named("fault")] == [2]


@pytest.mark.extended
def test_a_fault_on_one_node_while_the_job_is_stopped_on_another_starts_nothing_again(
    background: Start, script: Script, tmp_path: Path, ncclops: Ncclops
) -> None:
    receipts = tmp_path / "node-0/ranks/0/receipt.jsonl"
    train, port = script(fails_while_stopping("raises", receipts)), str(free_port())
    agents = [
        background(
            *("launch", "--profile", GLOO.profile, "--run-dir", f"node-{number}"),
            *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"),
            *("--master-addr", "127.0.0.1", "--master-port", port, train),
        )
        for number in range(2)
    ]
    wait_for(tmp_path / "trains")
    assert ncclops("stop", "node-0", "--reason", "drain").returncode == 0
    assert [agent.wait(LIMIT_S) for agent in agents] == [1, 1]
    runs = [Run(tmp_path / f"node-{number}") for number in range(2)]
    assert (tmp_path / "starts").read_text() == "xx"
    assert [run.named("restart") for run in runs] == [[], []]
    assert [run.verdict["outcome"] for run in runs] == ["stopped", "stopped"]
    for run in runs:
        assert "rank 1 failed meanwhile (ValueError: no space left)" in run.verdict["reason"]
    assert runs[0].verdict["workers"][0]["exit_code"] == 0


def test_a_rank_that_hangs_is_named_and_not_waited_for_until_the_grace_time_is_over(
    background: Start, script: Script, tmp_path: Path
) -> None:
    """Which is an hour here: the watch goes on, by its own limits."""
    profile = tmp_path / "patient.toml"
    profile.write_text(
        f'description = "x"\nextends = "{GLOO.profile}"\n'
        '[timeouts]\nstop_grace = "1h"\n[watch]\nhang = "14s"\nquiet = "15s"\n'
    )
    with (tmp_path / "said").open("wb") as said:
        launcher = background(
            *("launch", "--profile", str(profile), "--nproc-per-node", "2", "--run-dir", "run"),
            script(HANGS),
            stderr=said,
        )
    wait_for(tmp_path / "hangs")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    run = Run(tmp_path / "run")
    (hang,) = run.named("hang")
    assert (hang["culprits"], hang["action"]) == ([1], "end the run")
    (forced,) = run.named("stop-forced")
    assert forced["reason"] == "rank 1 hangs"
    assert run.named("restart") == []
    assert run.verdict["outcome"] == "interrupted"
    told = (tmp_path / "said").read_text()
    assert "ranks 0, 1 have not come to step 15: waiting for " in told
    assert "`ncclops stop run --grace 5s` shortens that" in told


@pytest.mark.parametrize("restart", ["in-process", "process"])
def test_where_ranks_stood_that_did_not_come_to_the_end_in_time_is_told_afterwards(
    background: Start, script: Script, tmp_path: Path, ncclops: Ncclops, restart: str
) -> None:
    """Of a job that hung until it was stopped, nothing told who had hung, and where."""
    launcher = background(
        *("launch", "--profile", GLOO.profile, "--nproc-per-node", "2", "--run-dir", "run"),
        *("--restart", restart),
        script(HANGS),
    )
    wait_for(tmp_path / "hangs")
    assert ncclops("stop", "run", "--grace", "1s").returncode == 0
    assert launcher.wait(LIMIT_S) == 1
    (forced,) = Run(tmp_path / "run").named("stop-forced")
    assert forced["late"] == [0, 1]
    told = ncclops("diagnose", "run").stdout
    assert "rank 1 on " in told
    assert "never entered all_reduce" in told
    assert "time.sleep(10000)" in told


def test_where_ranks_waited_for_a_process_group_is_told_after_a_stop(
    background: Start, script: Script, tmp_path: Path, ncclops: Ncclops
) -> None:
    """They get SIGTERM at once, since nothing can be cut: nothing told where they had waited."""
    source = """
import os, time
import torch.distributed as dist
time.sleep(11)
os.environ["MASTER_PORT"] = "1"
open("waits" + os.environ["RANK"], "w").close()
dist.init_process_group("gloo")
"""
    launcher = background(
        *("launch", "--profile", GLOO.profile, "--nproc-per-node", "2", "--run-dir", "run"),
        *("--restart", "process"),
        script(source),
    )
    for rank in range(2):
        wait_for(tmp_path / f"waits{rank}")
    assert ncclops("stop", "run").returncode == 0
    assert launcher.wait(LIMIT_S) == 1
    assert 'dist.init_process_group("gloo")' in ncclops("diagnose", "run").stdout


@pytest.mark.parametrize(
    ("lane", "restart"),
    [pytest.param("gloo", "process", marks=pytest.mark.extended), ("nccl", "none")],
    indirect=["lane"],
)
def test_after_a_failure_the_others_leave_their_collective_before_they_are_told_to_end(
    ncclops: Ncclops, script: Script, tmp_path: Path, lane: Lane, restart: str
) -> None:
    """What they clean up is done: SIGTERM alone ends a process, or waits for the collective."""
    source = """
import time
import torch.distributed as dist
dist.init_process_group(**lane)
pair = dist.new_group([0, 2])  # which rank 1 does not end with its process
if dist.get_rank() != 1: dist.all_reduce(torch.ones(10, device=device), group=pair)
dist.barrier()
if dist.get_rank() == 1: os._exit(3)
if dist.get_rank() == 2: time.sleep(1000)
try:
    dist.all_reduce(values := torch.ones(10, device=device), group=pair)
    values.sum().item()
finally:
    open("cleaned-up", "w").close()
"""
    done = ncclops(
        *("launch", "--profile", lane.profile, "--nproc-per-node", "3", "--run-dir", "run"),
        *("--restart", restart, "--warm-start", script(IN_SCRIPT + source)),
    )
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "cleaned-up").exists(), done.stderr
    run = Run(tmp_path / "run")
    assert run.verdict["first_failure"]["rank"] == 1
    assert run.verdict["reason"] == "rank 1 exited with code 3"
    (failed, *others) = sorted(run.verdict["workers"], key=lambda worker: worker["asked_to_stop"])
    assert (failed["rank"], [each["asked_to_stop"] for each in others]) == (1, [True, True])


WARNED = f"""{IN_SCRIPT}
import signal, sys, time
import torch.distributed as dist
from datetime import timedelta
from ncclops import receipt, restart
warned = []

def end(*_):
    warned.append(1)
    if len(warned) > 1:  # the first is a scheduler's, long before the time is over
        time.sleep(0.2)
        print("saved", flush=True)
        sys.exit(0)

def steps(is_first):
    for n in range(10**9):
        if is_first or n <= 10:  # later, it would wait for a rank that has ended by its handler
            dist.all_reduce(torch.ones(100, device=device))
        time.sleep(0.01)
        receipt.step(n)
        if n == 5 and is_first:
            signal.raise_signal(signal.SIGTERM)
            dist.barrier()
            if dist.get_rank() == 1: raise RuntimeError("once")
        if n == 10 and not is_first:
            warned[:] = [1]
            open("goes-on-" + str(dist.get_rank()), "w").close()

def train(call: restart.CallWrapper):
    signal.signal(signal.SIGTERM, end)
    if OWN:
        call.keep_going(
            lambda: steps(call.iteration == 0),
            lambda old, new: call.init_process_group("gloo") and None,
        )
    else:
        dist.init_process_group(**lane)
        steps(call.iteration == 0)

if OWN:
    restart.Wrapper()(train)()
else:
    from types import SimpleNamespace
    is_first = not os.path.exists(f"begun-{{os.environ['RANK']}}")
    open(f"begun-{{os.environ['RANK']}}", "w").close()
    train(SimpleNamespace(iteration=0 if is_first else 1))
"""


@lanes("gloo")
@pytest.mark.parametrize("own", [True, False], ids=["its own wrapper", "launch's"])
def test_after_a_restart_the_script_s_handler_of_a_stop_runs_to_its_end(
    background: Start, script: Script, tmp_path: Path, lane: Lane, *, own: bool
) -> None:
    """Once, and a SIGTERM before that, of which it made nothing, has ended no rank."""
    launcher = background(
        *("launch", "--profile", lane.profile, "--nproc-per-node", "2", "--run-dir", "run"),
        script(f"OWN = {own}\n{WARNED}"),
    )
    for rank in (0, 1):
        wait_for(tmp_path / f"goes-on-{rank}")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    run = Run(tmp_path / "run")
    assert run.verdict["reason"] == "stopped by SIGTERM"
    assert [worker["exit_code"] for worker in run.verdict["workers"]] == [0, 0]
    assert [run.stdout(rank).count("saved") for rank in (0, 1)] == [1, 1]
    assert [each["ranks_lost"] for each in run.named("restart")] == [[]]


LEFT_WAITING = f"""{IN_SCRIPT}
import signal, sys, time
import torch.distributed as dist
dist.init_process_group(**lane)
rank = dist.get_rank()

def save(*_):
    if rank == 1:
        time.sleep(5)  # longer than ranks are looked at: one that is left may still move
    open(f"saved-{{rank}}", "w").close()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
dist.barrier()
if rank < 2:
    open(f"waits-{{rank}}", "w").close()
    time.sleep(1000)
dist.all_reduce(torch.ones(100, device=device))
"""


@lanes("gloo")
def test_a_rank_that_waits_for_one_whose_handler_has_ended_runs_its_own(
    background: Start, script: Script, tmp_path: Path, lane: Lane
) -> None:
    """It was killed in its collective at the end of the grace time, and had not saved."""
    launcher = background(
        *("launch", "--profile", lane.profile, "--nproc-per-node", "3", "--run-dir", "run"),
        script(LEFT_WAITING),
    )
    for rank in (0, 1):
        wait_for(tmp_path / f"waits-{rank}")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    run = Run(tmp_path / "run")
    assert [worker["exit_code"] for worker in run.verdict["workers"]] == [0, 0, 0]
    (forced,) = run.named("stop-forced")
    assert forced["ranks"] == [2]
    saved = [(tmp_path / f"saved-{rank}").stat().st_mtime for rank in range(3)]
    assert max(saved[:2]) <= forced["ts"]
    assert run.verdict["reason"] == "stopped by SIGTERM"
