"""A job that has finished is not done again, and no process outlives it, whatever its ranks do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText
from tests.launch.conftest import Run

pytestmark = pytest.mark.slow

Script = Callable[[str], Path]
Ncclops = Callable[..., CompletedText]

STUCK = """
import ctypes, os
class Stuck:
    def __del__(self, sleep=ctypes.PyDLL(None).sleep):
        sleep(1000)  # with the GIL in hand
if os.environ["RANK"] == "1":
    stuck = Stuck()
open("starts", "a").write("x")
"""


@pytest.mark.extended
def test_a_process_that_does_not_end_after_its_script_is_ended_and_the_job_is_completed(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    options = ("--profile", "local-cpu", "--nproc-per-node", "2", "--run-dir", "run")
    done = ncclops("launch", *options, script(STUCK))
    run = Run(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "starts").read_text() == "xx"
    assert [event["rank"] for event in run.named("exit-forced")] == [1]
    assert run.verdict["outcome"] == "completed"
    assert run.verdict["ranks_lost"] == []
    assert run.reason.startswith("rank 1 was killed by SIGKILL, after the script had")
    assert "rank 1: its script has ended, and its process does not" in done.stderr


LEFT_BEHIND = """
import os, pathlib, signal, time
with open("starts", "a") as starts:
    starts.write(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}, ")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
    while not pathlib.Path("finished").exists():
        time.sleep(0.01)
    time.sleep(3)  # nothing announces that the other rank has left its script
    os.kill(os.getpid(), signal.SIGKILL)
open("finished", "w").close()
"""


def test_a_rank_that_had_finished_is_not_started_again_alone(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """The one that dies had not: what follows is decided by the agent, and is all of the job."""
    options = ("--profile", "local-cpu", "--nproc-per-node", "2", "--run-dir", "run")
    done = ncclops("launch", *options, script(LEFT_BEHIND))
    run = Run(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    starts = (tmp_path / "starts").read_text().split(", ")
    assert sorted(filter(None, starts)) == ["0 of 2", "0 of 2", "1 of 2", "1 of 2"]
    (escalation,) = run.named("escalation")
    assert escalation["reason"] == "all ranks but rank 0 had finished"
    assert run.verdict["attempts"] == 2
    assert run.verdict["reason"] == "2 workers exited 0"


REDUCER = """
import threading, time
import torch, torch.distributed as dist

def train():
    dist.init_process_group("gloo")
    weights = [torch.nn.Parameter(torch.ones(1))]
    of_model = dist.Reducer(weights, [[0]], [1 << 20], dist.group.WORLD)
    called = threading.Event()
    def linger(_):
        called.set()
        time.sleep(1)  # nothing announces that the other thread waits in the destructor
    if dist.get_rank() == 1:
        time.sleep(0.5)  # what is finished already calls back at once, and not from the worker
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(linger)
    called.wait()
    dist.destroy_process_group()

train()
"""


@pytest.mark.extended
def test_a_model_lets_go_of_its_group_without_restarts_in_place_as_well(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    options = ("--profile", "local-cpu", "--nproc-per-node", "2", "--run-dir", "run")
    done = ncclops("launch", "--restart", "none", *options, script(REDUCER))
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "run").verdict["reason"] == "2 workers exited 0"


LEAVES_EARLY = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(20):
    dist.all_reduce(torch.ones(1))
    if step == 10 and dist.get_rank() == 1 and not os.path.exists("left"):
        open("left", "w").close()
        {leave}
"""


@pytest.mark.extended
def test_a_rank_that_exits_0_in_the_middle_of_the_script_is_lost(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """Its exit code says that all is well, and the others had to go on without it."""
    options = ("--profile", "local-cpu", "--nproc-per-node", "3", "--run-dir", "run")
    leave = "import ctypes; ctypes.CDLL(None)._exit(0)"  # in a library, say
    done = ncclops("launch", *options, script(LEAVES_EARLY.format(leave=leave)))
    assert done.returncode == 0, done.stderr
    verdict = Run(tmp_path / "run").verdict
    assert (verdict["outcome"], verdict["ranks_lost"]) == ("completed", [1])
    assert verdict["reason"] == (
        "rank 1 exited with code 0, the others went on; 2 workers exited 0"
    )
    assert [worker["rank"] for worker in verdict["workers"] if worker["left"]] == [1]
    assert "internal error" not in done.stderr


@pytest.mark.parametrize(
    "leave", [pytest.param("sys.exit(0)", marks=pytest.mark.extended), "os._exit(0)"]
)
def test_a_script_that_ends_on_one_rank_while_the_others_need_it_is_started_again(
    ncclops: Ncclops, script: Script, tmp_path: Path, leave: str
) -> None:
    options = ("--profile", "local-cpu", "--nproc-per-node", "3", "--run-dir", "run")
    done = ncclops("launch", *options, script(LEAVES_EARLY.format(leave=leave)))
    assert done.returncode == 0, done.stderr
    assert (
        "rank 1: ended, or destroyed its groups, while other ranks still needed it" in done.stderr
    )
    run = Run(tmp_path / "run")
    assert len(run.named("restart")) == 1
    assert (run.verdict["outcome"], run.verdict["ranks_lost"]) == ("completed", [])


def restarted_once(ncclops: Ncclops, path: Path, run_dir: Path, *, ranks: int) -> Run:
    """The run of the script at ``path``, which has ended well after one restart in place."""
    options = ("--profile", "local-cpu", "--nproc-per-node", str(ranks), "--run-dir", run_dir)
    done = ncclops("launch", *options, path)
    assert done.returncode == 0, done.stderr
    run = Run(run_dir)
    assert len(run.named("restart")) == 1
    return run


FEWER_BATCHES = """
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
fewer = dist.get_rank() == 1 and not os.path.exists("left")
if fewer:
    open("left", "w").close()
batches = DataLoader(torch.ones(6 if fewer else 8, 2), num_workers=1, persistent_workers=True)
for batch in batches:
    model(batch).sum().backward()
"""


def test_a_script_that_ends_on_one_rank_is_started_again_where_a_data_loader_has_its_connections(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """The process of a data loader has all that its rank had, and outlives the script."""
    run = restarted_once(ncclops, script(FEWER_BATCHES), tmp_path / "run", ranks=2)
    assert (run.verdict["outcome"], run.verdict["ranks_lost"]) == ("completed", [])
    assert not run.named("hang")


@pytest.mark.extended
def test_a_script_that_ends_with_os_exit_on_all_ranks_has_ended_well(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    text = LEAVES_EARLY.format(leave="pass") + "\nos._exit(0)\n"
    options = ("--profile", "local-cpu", "--nproc-per-node", "2", "--restart", "process")
    done = ncclops("launch", *options, "--run-dir", "run", script(text))
    assert done.returncode == 0, done.stderr
    verdict = Run(tmp_path / "run").verdict
    assert (verdict["reason"], verdict["ranks_lost"]) == ("2 workers exited 0", [])


SAVES_LAST = """
import atexit, os, sys, threading, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
with open("starts", "a") as starts:
    starts.write(f"{rank} of {dist.get_world_size()}, ")
atexit.register(os.mkdir, f"at-exit-{rank}")
threading.Thread(target=time.sleep, args=(1000,)).start()
dist.all_reduce(torch.ones(1))
try:
    if rank == 0:
        time.sleep(2)  # nothing announces what the others make of the end of these ranks
        open("saved", "w").close()
    os._exit(0)
finally:
    os._exit(3)
"""


@pytest.mark.extended
def test_ranks_that_end_with_os_exit_wait_for_the_one_that_saves(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """Nobody trains again alone, and the processes end as the script says: at once."""
    options = ("--profile", "local-cpu", "--nproc-per-node", "3", "--run-dir", "run")
    done = ncclops("launch", *options, script(SAVES_LAST))
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    starts = (tmp_path / "starts").read_text().split(", ")
    assert sorted(filter(None, starts)) == ["0 of 3", "1 of 3", "2 of 3"]
    assert (tmp_path / "saved").exists()
    assert not list(tmp_path.glob("at-exit-*"))
    assert not run.named("restart")
    assert not run.named("slow-exit")
    assert (run.verdict["outcome"], run.verdict["ranks_lost"]) == ("completed", [])
    assert run.verdict["reason"] == "3 workers exited 0"


LEAVES_WHEN_INTERRUPTED = """
import os, time
import torch
import torch.distributed as dist

first = not os.path.exists("failed")
try:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if first and dist.get_rank() == 1:
        open("failed", "w").close()
        raise ValueError("once")
    if first:
        time.sleep(60)
except ValueError:
    raise
except BaseException:
    os._exit(3)
"""


@pytest.mark.extended
def test_a_rank_that_calls_os_exit_on_the_way_to_a_restart_is_not_lost(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """What is raised into the script there is not the script's own failure."""
    run = restarted_once(ncclops, script(LEAVES_WHEN_INTERRUPTED), tmp_path / "run", ranks=3)
    assert run.verdict["ranks_lost"] == []
