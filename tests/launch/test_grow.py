"""`--restart in-process:grow`: new processes take the places of ranks that are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, CompletedText, free_port
from tests.lanes import IN_SCRIPT, lanes
from tests.launch.conftest import Background, Run
from tests.launch.test_kill import wait_until

pytestmark = pytest.mark.slow

# Steps until the file `stop` is there; rank 0 keeps the step, which each start goes on from.
TRAINING = (
    IN_SCRIPT
    + """
import time
from pathlib import Path
import torch.distributed as dist

dist.init_process_group(**lane)
rank, size, step = dist.get_rank(), dist.get_world_size(), 0
if Path("step").exists():
    step = int(Path("step").read_text())
print("in", rank, "of", size, "with pid", os.getpid(), flush=True)
if Path(f"ends-{rank}").exists():
    os.kill(os.getpid(), 9)
stop = False
while not stop:
    seen = torch.tensor([1.0, float(rank == 0 and Path("stop").exists())], device=device)
    dist.all_reduce(seen)
    total, stop = seen.tolist()
    assert total == size
    Path(f"in-{os.getpid()}").touch()  # with communicators, where there are any
    step += 1
    if rank == 0:
        os.environ.clear()  # ranks agree all the same
        Path("step.new").write_text(str(step))
        os.replace("step.new", "step")
    time.sleep(0.02)
dist.destroy_process_group()
print("done", rank, "of", size, flush=True)
"""
)


def pid_of(run: Run, rank: int) -> int:
    """Of its newest process."""
    return [int(e["pid"]) for e in run.named("worker-started") if e["rank"] == rank][-1]


def whole(run: Run, tmp_path: Path, restarts: int) -> bool:
    """Whether there were so many restarts, and the newest process of each rank is in the script."""
    if not run.begun or len(run.named("restart")) != restarts:
        return False
    if len(run.named("worker-started")) != 3 + restarts:
        return False
    return all((tmp_path / f"in-{pid_of(run, rank)}").exists() for rank in range(3))


@lanes("nccl", extended=("gloo",))
def test_a_job_that_loses_ranks_ends_whole(
    background: Callable[..., Background],
    script: Callable[[str], Path],
    quick_profile: Path,
    tmp_path: Path,
) -> None:
    """Also rank 0, whose output is shown; the others keep their processes."""
    run = Run(tmp_path / "run")
    options = ["--profile", quick_profile, "--nproc-per-node", "3"]
    with (tmp_path / "shown").open("w") as shown_file:
        job = background(
            *("launch", *options, "--restart", "in-process:grow", "--run-dir", "run"),
            script(TRAINING),
            stdout=shown_file,
        )
    wait_until(lambda: whole(run, tmp_path, 0), "three ranks in the script")
    kept = pid_of(run, 1)
    for restarts, lost in enumerate((2, 0), start=1):
        os.kill(pid_of(run, lost), signal.SIGKILL)
        wait_until(partial(whole, run, tmp_path, restarts), f"three ranks after {restarts}")
    (tmp_path / "stop").touch()
    assert job.wait(LIMIT_S) == 0
    assert pid_of(run, 1) == kept
    lost_and_back = [(e["ranks_lost"], e["ranks_returned"]) for e in run.named("restart")]
    assert lost_and_back == [([2], [2]), ([0], [0])]
    assert (run.verdict["outcome"], run.verdict["ranks_lost"]) == ("completed", [])
    assert run.verdict["reason"] == "3 workers exited 0"
    assert [worker["rank"] for worker in run.verdict["workers"]] == [0, 1, 2]
    # Rank 0 is shown throughout, the new process as the old one.
    shown = (tmp_path / "shown").read_text()
    assert shown.count("[rank0]: in 0 of 3") == 3
    assert "[rank0]: done 0 of 3" in shown


@pytest.mark.extended
def test_a_rank_that_ends_again_and_again_is_left_out_in_the_end(
    background: Callable[..., Background],
    script: Callable[[str], Path],
    quick_profile: Path,
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    (tmp_path / "ends-1").touch()
    profile = [quick_profile, "--timeout", "grow=30s", "--nproc-per-node", "2"]
    with (tmp_path / "told").open("w") as told:
        job = background(
            *("launch", "--profile", *profile, "--restart", "in-process:grow"),
            *("--run-dir", "run", script(TRAINING)),
            stderr=told,
        )
    wait_until(
        lambda: run.begun and len(run.named("worker-started")) == 5, "three processes in its place"
    )
    wait_until(lambda: " of 1 with pid" in run.stdout(0), "rank 0 alone")
    (tmp_path / "stop").touch()
    assert job.wait(LIMIT_S) == 0
    assert run.verdict["ranks_lost"] == [1]
    assert run.reason.startswith("rank 1 was killed by SIGKILL, the others went on")
    refusal = "rank 1: no new process takes its place: 3 have ended"
    assert refusal in (tmp_path / "told").read_text()


BROKEN_GPU = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(100):
    dist.all_reduce(torch.ones(1))
    if step == 10 and dist.get_rank() == 1 and dist.get_world_size() == 3:
        print("RuntimeError: CUDA error: uncorrectable ECC error encountered", file=sys.stderr)
        sys.stderr.flush()
        os.kill(os.getpid(), 9)
dist.destroy_process_group()
"""


def test_a_rank_whose_gpu_is_broken_is_not_replaced(
    ncclops: Callable[..., CompletedText],
    script: Callable[[str], Path],
    quick_profile: Path,
    tmp_path: Path,
) -> None:
    """There is no NVML here: the rank's output is all that is known."""
    done = ncclops(
        *("launch", "--profile", quick_profile, "--nproc-per-node", "3", "--run-dir", "run"),
        *("--restart", "in-process:grow", "--timeout", "grow=2s", script(BROKEN_GPU)),
        env={"CUDA_VISIBLE_DEVICES": "4,6,7"},
    )
    run = Run(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    why = "rank 1: no new process takes its place: GPU 6 on node"
    assert why in done.stderr, done.stderr
    assert "uncorrectable ECC error" in done.stderr.partition(why)[2].splitlines()[0]
    assert len(run.named("worker-started")) == 3
    assert run.verdict["ranks_lost"] == [1]


@pytest.mark.extended
def test_the_only_rank_of_a_node_comes_back_to_those_of_another(
    background: Callable[..., Background],
    script: Callable[[str], Path],
    quick_profile: Path,
    tmp_path: Path,
) -> None:
    """First of the node that serves the job's store, then of the other one."""
    runs = [Run(tmp_path / f"node-{number}") for number in range(2)]
    train, port = script(TRAINING), free_port()
    agents = [
        background(
            *("launch", "--profile", quick_profile, "--restart", "in-process:grow"),
            *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("--timeout", "grow=60s", "--run-dir", run.path, train),
        )
        for number, run in enumerate(runs)
    ]

    def both_work(started: list[int]) -> bool:
        if not all(run.begun for run in runs):
            return False
        if [len(run.named("worker-started")) for run in runs] != started:
            return False
        return all((tmp_path / f"in-{pid_of(run, n)}").exists() for n, run in enumerate(runs))

    wait_until(lambda: both_work([1, 1]), "both in the script")
    for lost, started in enumerate(([2, 1], [2, 2])):
        os.kill(pid_of(runs[lost], lost), signal.SIGKILL)
        wait_until(partial(both_work, started), f"rank {lost} back")
    (tmp_path / "stop").touch()
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0]
    for run in runs:
        assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (1, [])
        assert run.verdict["reason"] == "2 workers exited 0 on 2 nodes"
