"""Jobs on torch's real ProcessGroupNCCL under `ncclops launch`, with the fake GPU below."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText, run_ncclops
from tests.fakegpu.host import Host
from tests.fakegpu.place import Place
from tests.launch.conftest import Run

# The loss falls by a quarter with each step, whatever the number of ranks is. FAULT is a list of
# kind:rank, each of which happens once, two steps after the one before.
TRAINING = """
import ctypes, glob, os, signal, sys, time
import torch, torch.distributed as dist
STEPS = 20
faults, before = os.environ.get("FAULT", "").split(), len(glob.glob("faulted*"))
kind, victim = faults[before].split(":") if before < len(faults) else ("none", -1)

def set_rules(*lines):
    with open(f"rules{os.getpid()}", "w") as file:
        file.writelines(f"{line}\\n" for line in lines)
    os.replace(file.name, os.environ["FAKEGPU_CONTROL"])

def fail():
    open(f"faulted{before}", "w").close()
    if kind == "raise": raise RuntimeError("out of the blue")
    if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang": time.sleep(1000)
    if kind == "gil": ctypes.PyDLL(None).sleep(1000)
    if kind == "nccl": set_rules(f"comm:* rank={victim} times=1 error=ncclRemoteError")
    if kind == "lost":
        set_rules(f"gpu {victim} lost=1 xid=79", f"device:* rank={victim} error=cudaErrorUnknown")
    if kind == "abort":
        set_rules("ncclCommAbort rank=0 times=1 hang=forever")
        raise RuntimeError("an abort hangs")

if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    set_rules()  # what struck the first processes is over
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
eagerly = {"device_id": device} if "EAGER" in os.environ else {}
dist.init_process_group(os.environ.get("BACKEND", "nccl"), **eagerly)
rank, world = dist.get_rank(), dist.get_world_size()
groups = [None]
if world == 4:  # pairs of tensor parallelism, and pipelines across them
    for members in ([0, 1], [2, 3], [0, 2], [1, 3]):
        group = dist.new_group(members)
        groups += [group] if rank in members else []
begin, loss = torch.load("checkpoint") if os.path.exists("checkpoint") else (0, 8.0)
weight = torch.tensor([loss], device=device)
for step in range(begin, STEPS):
    if step == 2 + 2 * before and rank == int(victim):
        fail()
    gradient = weight * 0.25
    for group in groups:
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    weight = weight - gradient
    loss = weight.item()
    if rank == 0:
        torch.save((step + 1, loss), "checkpoint-new")
        os.replace("checkpoint-new", "checkpoint")
dist.barrier()
dist.destroy_process_group()
print(f"loss {loss:.6f} of {world}", flush=True)
"""
pytestmark = pytest.mark.timeout(320)
LOSS = f"loss {8 * 0.75**20:.6f}"


@pytest.fixture
def launch(fake_gpu_place: Place, host: Host, tmp_path: Path) -> Callable[..., CompletedText]:
    """``launch(*options, **variables)`` runs the training with the CUDA build of torch."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)

    def run(*options: str, **variables: str) -> CompletedText:
        environment = host.environment | {"NCCLOPS_FREED_WITHIN_S": "5"} | variables
        arguments = ["launch", "--run-dir", "run", *options, str(script)]
        python = fake_gpu_place.python
        return run_ncclops(tmp_path, *arguments, env=environment, python=python, limit_s=300)

    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def blames(run: Run) -> list[tuple[str, int]]:
    """Kind and rank of the fault that each restart in place was for."""
    paths = sorted(run.path.glob("incidents/*/incident.json"), key=lambda p: int(p.parent.name))
    records = [json.loads(path.read_text()) for path in paths]
    return [(record["cause"], record["first_faulty_rank"]) for record in records]


def test_faults_of_all_kinds_one_after_the_other(
    launch: Callable[..., CompletedText], run: Run
) -> None:
    """No profile; groups over CPUs and GPUs, tensor and pipeline pairs."""
    done = launch(
        *("--nproc-per-node", "4", "--timeout", "soft=6s", "--timeout", "hard=10s"),
        BACKEND="cpu:gloo,cuda:nccl",
        FAULT="raise:1 nccl:2 hang:3 abort:1 gil:3 kill:0",
    )
    assert done.returncode == 0, done.stderr
    assert "driver 580.95.05 | GPU 8 × NVIDIA H200" in done.stderr
    assert "profile single-node-h200 (chosen: 1 node, 8 GPUs)" in done.stderr
    assert blames(run) == [
        ("exception", 1),
        ("nccl-error", 2),
        ("soft-timeout", 3),
        ("exception", 1),
        ("died", 3),
        ("died", 0),
    ]
    events = [(event["kind"], event["rank"]) for event in run.named("fault")]
    assert events == blames(run)
    assert run.verdict["outcome"] == "completed"
    assert run.verdict["attempts"] == 1
    assert run.verdict["ranks_lost"] == [0, 3]
    assert "finished without ranks 0, 3" in done.stderr
    assert [run.stdout(rank) for rank in (1, 2)] == [f"{LOSS} of 2\n"] * 2
    assert "abort is not done after" in run.stderr(0)


@pytest.mark.parametrize("how", ["lazily", "eagerly"])
def test_a_communicator_that_does_not_come_up_costs_no_rank(
    launch: Callable[..., CompletedText], run: Run, host: Host, how: str
) -> None:
    """One rank fails in ncclCommInitRank; the other waits there, and no abort frees it."""
    host.set("ncclCommInitRank* rank=1 times=1 error=ncclSystemError")
    variables = {"EAGER": "1"} if how == "eagerly" else {}
    done = launch("--nproc-per-node", "2", **variables)
    assert done.returncode == 0, done.stderr
    (retry,) = run.named("retry")
    assert retry["reason"].startswith("new processes: rank 0 waited in NCCL")
    assert retry["changes"]["NCCLOPS_NCCL_INIT"] == "lazy"
    assert retry["reason"] + " (NCCLOPS_NCCL_INIT=lazy, NCCLOPS_BOOTSTRAP_BARRIER=skipped)\n" in (
        done.stderr
    )
    assert blames(run)[0] == ("exception", 1)
    assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (2, [])
    assert [run.stdout(rank) for rank in (0, 1)] == [f"{LOSS} of 2\n"] * 2


@pytest.mark.parametrize(
    ("error", "what", "kind"),
    [
        ("cudaErrorIllegalAddress", "an illegal memory access was encountered", "cuda-error"),
        ("cudaErrorECCUncorrectable", "uncorrectable ECC error encountered", "gpu-hardware"),
    ],
)
def test_a_corrupted_context_leads_to_new_processes(
    launch: Callable[..., CompletedText], run: Run, host: Host, error: str, what: str, kind: str
) -> None:
    host.set(f"device:allreduce rank=1 nth=3 error={error}")
    done = launch("--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    (retry,) = run.named("retry")
    assert retry["reason"] == f"new processes: the CUDA context of rank 1 is corrupted: {what}"
    (classified,) = run.named("classified")
    assert (classified["class"], classified["rank"]) == (kind, 1)
    assert blames(run)[0] == ("exception", 1)
    assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (2, [])
    assert [run.stdout(rank) for rank in (0, 1)] == [f"{LOSS} of 2\n"] * 2


def test_a_gpu_that_is_lost_costs_its_rank_alone(
    launch: Callable[..., CompletedText], run: Run
) -> None:
    done = launch("--nproc-per-node", "3", FAULT="lost:1")
    assert done.returncode == 0, done.stderr
    assert blames(run) == [("exception", 1)]
    assert run.verdict["attempts"] == 1
    assert run.verdict["ranks_lost"] == [1]
    assert [run.stdout(rank) for rank in (0, 2)] == [f"{LOSS} of 2\n"] * 2
    assert "HealthCheckError: GPU: the GPU does not answer: GPU is lost" in run.stderr(1)
