"""Threads that a script has beside its main one, on torch's real ProcessGroupNCCL.

What a collective that is aborted has not summed reaches no checkpoint, whichever thread reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText, run_ncclops
from tests.fakegpu.host import Host
from tests.fakegpu.place import Place
from tests.launch.conftest import Run

# The loss falls by a quarter with each step. Rank 1 is killed once while the others, whose work is
# queued on the device, wait for it there.
BEGINNING = """
import os, queue, signal, threading, time
import torch, torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)

def begin():
    return torch.load("checkpoint") if os.path.exists("checkpoint") else (0, 8.0)

def save(step, loss):
    torch.save((step, loss), "checkpoint-new")
    os.replace("checkpoint-new", "checkpoint")

def fail_once(step):
    if step == 5 and dist.get_rank() == 1 and not os.path.exists("faulted"):
        open("faulted", "w").close()
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)

def step_on(weight):
    gradient = weight * 0.25
    dist.all_reduce(gradient)
    return weight - gradient / dist.get_world_size()
"""
SAVES_IN_A_THREAD = """
jobs = queue.Queue()

def saver():
    torch.cuda.set_device(device)
    while True:
        step, weight = jobs.get()
        loss = weight.item()
        if dist_rank == 0:
            save(step, loss)
        jobs.task_done()

dist.init_process_group("nccl")
dist_rank = dist.get_rank()
threading.Thread(target=saver, daemon=True).start()
start, loss = begin()
weight = torch.tensor([loss], device=device)
for step in range(start, 20):
    fail_once(step)
    weight = step_on(weight)
    jobs.put((step + 1, weight.clone()))
    if step % 5 == 0:
        torch.cuda.synchronize()
jobs.join()
"""
TRAINS_IN_A_THREAD = """
def train():
    global weight
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    start, loss = begin()
    weight = torch.tensor([loss], device=device)
    for step in range(start, 20):
        fail_once(step)
        weight = step_on(weight)
        loss = weight.item()
        if dist.get_rank() == 0:
            save(step + 1, loss)

training = threading.Thread(target=train)
training.start()
training.join()
"""
END = """
dist.barrier()
print(f"loss {weight.item():.6f} of {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
"""
pytestmark = pytest.mark.timeout(320)


@pytest.fixture
def launch(fake_gpu_place: Place, host: Host, tmp_path: Path) -> Callable[..., CompletedText]:
    """``launch(script, *options)`` runs it on three ranks with the CUDA build of torch."""

    def run(script: str, *options: str) -> CompletedText:
        path = tmp_path / "train.py"
        path.write_text(BEGINNING + script + END)
        arguments = ["launch", "--run-dir", "run", "--nproc-per-node", "3", *options, str(path)]
        python = fake_gpu_place.python
        return run_ncclops(tmp_path, *arguments, env=host.environment, python=python, limit_s=300)

    return run


@pytest.mark.parametrize("script", [SAVES_IN_A_THREAD, TRAINS_IN_A_THREAD], ids=["saves", "trains"])
@pytest.mark.parametrize("how", ["in-process", pytest.param("process", marks=pytest.mark.extended)])
def test_no_thread_goes_on_with_what_an_abort_has_left(
    launch: Callable[..., CompletedText], tmp_path: Path, script: str, how: str
) -> None:
    done = launch(script, "--restart", how, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    left = 2 if how == "in-process" else 3
    run = Run(tmp_path / "run")
    assert run.stdout(0).splitlines()[-1] == f"loss {8 * 0.75**20:.6f} of {left}", done.stderr
    assert (tmp_path / "faulted").exists()
    assert "Exception in thread" not in run.stderr(0)
