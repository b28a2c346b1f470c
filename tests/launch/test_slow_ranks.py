"""A rank that the others wait for is found without a change to the script, and none that is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, CompletedText, free_port
from tests.fakegpu.host import Host
from tests.lanes import IN_SCRIPT, Lane, lanes
from tests.launch.conftest import Background, Run

pytestmark = pytest.mark.slow

Ncclops = Callable[..., CompletedText]
Script = Callable[[str], Path]

# Slowness is sleep, and much of it: other processes of the machine may take the rest.
TRAINING = (
    IN_SCRIPT
    + """
import sys, time
import torch.distributed as dist
from ncclops import receipt
dist.init_process_group(**lane)
rank, mode, slow_s = dist.get_rank(), sys.argv[1], float(sys.argv[2])
model = torch.nn.Linear(4, 4).to(device)
if mode == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(40):
    time.sleep(0.06 + (slow_s if rank == 1 else 0))
    if mode == "ddp":
        model(torch.ones(4, device=device)).sum().backward()
        optimizer.step()
    else:
        dist.all_reduce(torch.ones(100, device=device))
    if device is not None:
        torch.cuda.synchronize()
    if mode == "checkpoints":
        if rank == 0 and n % 8 == 7:
            time.sleep(0.4)
        receipt.step(n)
dist.destroy_process_group()
"""
)


def is_rank_1(run: Run, stderr: str, cause: str) -> None:
    """It is an event, a line of the verdict, and a field of it."""
    (slow,) = run.named("straggler")
    assert (slow["rank"], slow["kind"], slow["measured"]) == (1, "chronic", "waiting")
    assert slow["ratio"] > 1.2
    (told,) = run.verdict["slow_ranks"]
    assert told["rank"] == 1
    assert "ncclops: rank 1 on " in stderr
    assert f" s; {cause}" in stderr


@lanes("nccl", extended=("gloo",))
@pytest.mark.extended
def test_the_others_wait_for_it_at_the_end_of_their_backward_pass(
    ncclops: Ncclops, script: Script, lane: Lane, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cause = ""
    if lane.needs_gpus:
        host: Host = request.getfixturevalue("host")
        host.set("gpu * utilization_percent=97", "gpu 1 clock_mhz=1005 throttle_reasons=0x4")
        cause = "GPU 1: slowed by software power cap, SM clock 1005 of 1980 MHz"
    options = ("--profile", lane.profile, "--nproc-per-node", "2", "--run-dir", "run")
    done = ncclops("launch", *options, "--restart", "none", script(TRAINING), "ddp", "0.06")
    assert done.returncode == 0, done.stderr
    is_rank_1(Run(tmp_path / "run"), done.stderr, cause)


@pytest.mark.extended
def test_ranks_of_several_nodes_are_compared(
    background: Callable[..., Background], script: Script, tmp_path: Path
) -> None:
    port, path = str(free_port()), script(TRAINING)
    agents = []
    for number in range(2):
        with (tmp_path / f"stderr-{number}").open("w") as stderr:
            agents.append(
                background(
                    *("launch", "--profile", "local-cpu", "--run-dir", f"node-{number}"),
                    *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"),
                    *("--master-addr", "127.0.0.1", "--master-port", port),
                    *("--restart", "none", path, "plain", "0.06"),
                    stderr=stderr,
                )
            )
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0]
    runs = [Run(tmp_path / f"node-{number}") for number in range(2)]
    is_rank_1(runs[1], (tmp_path / "stderr-1").read_text(), "")
    assert runs[0].named("straggler") == [], "told by its own node"
    assert runs[0].verdict["slow_ranks"] == runs[1].verdict["slow_ranks"]
    assert "ncclops: rank 1 on " in (tmp_path / "stderr-0").read_text()


def test_a_rank_that_alone_writes_checkpoints_is_not_slow(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    options = ("--profile", "local-cpu", "--nproc-per-node", "2", "--run-dir", "run")
    done = ncclops("launch", *options, script(TRAINING), "checkpoints", "0")
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    assert run.named("straggler") == []
    assert run.verdict["slow_ranks"] == []
    records = (run.path / "ranks" / "0" / "receipt.jsonl").read_text()
    assert '"kind": "pace"' in records, "it was measured"
