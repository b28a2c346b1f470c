"""A hang over several nodes is found as on one, and what only takes long is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, free_port
from tests.launch.conftest import Background, Run

pytestmark = pytest.mark.slow

Start = Callable[..., Background]
Script = Callable[[str], Path]

# The timeouts of the restart core and of groups stay at their minutes.
WINDOWS = """
description = "For tests: short windows."
extends = "local-cpu"
[timeouts]
stop_grace = "3s"
[watch]
hang = "3s"
quiet = "4s"
"""

TRAINING = """
import ctypes, os, time
from pathlib import Path
import torch, torch.distributed as dist
from ncclops import receipt
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
groups = [dist.new_group() for _ in range(2)]
store = dist.distributed_c10d._get_default_store()

def once():
    try:
        Path(f"faulted-{{rank}}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

for n in range(12):
    if n == {at}:
        {fault}
    dist.all_reduce(torch.ones(10))
    receipt.step(n)
receipt.end()
print("ended", dist.get_world_size())
dist.destroy_process_group()
"""

# Each of the two ranks waits in another group, once.
DEADLOCK = "dist.all_reduce(torch.ones(1), group=groups[rank]) if once() else None"
SLEEPS = "time.sleep(600) if rank == 1 and once() else None"
KEEPS_THE_GIL = "ctypes.PyDLL(None).sleep(600) if rank == 1 and once() else None"
# The first step of one rank takes three times the windows.
COMPILES = "time.sleep(12) if rank == 1 and once() else None"
# Rank 0 is in a declared phase, and rank 1 looks again and again whether it is over.
POLLS = """if rank == 0:
            with receipt.phase("checkpoint", limit="60s"):
                time.sleep(12)
            store.set("saved", "1")
        while not store.check(["saved"]):
            time.sleep(0.1)"""


@pytest.fixture
def train(background: Start, script: Script, tmp_path: Path) -> Callable[..., list[Run]]:
    """``train(fault, at=6, restart=…)`` runs a rank on each of two nodes, to their end."""

    def run(fault: str, at: int = 6, restart: str = "in-process") -> list[Run]:
        profile = tmp_path / "windows.toml"
        profile.write_text(WINDOWS)
        path, port = script(TRAINING.format(fault=fault, at=at)), free_port()
        agents = [
            background(
                *("launch", "--profile", profile, "--run-dir", f"node-{number}"),
                *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"),
                *("--master-addr", "127.0.0.1", "--master-port", str(port)),
                *("--restart", restart, path),
            )
            for number in range(2)
        ]
        for agent in agents:
            agent.wait(LIMIT_S)
        return [Run(tmp_path / f"node-{number}") for number in range(2)]

    return run


Train = Callable[..., list[Run]]


@pytest.mark.extended
def test_ranks_that_wait_in_two_groups_are_found_and_start_again(train: Train) -> None:
    here, there = train(DEADLOCK)
    (hang,) = here.named("hang")
    assert hang["action"] == "restart in place"
    assert {each["rank"] for each in hang["evidence"]} == {0, 1}
    assert there.named("hang") == [], "the node of the first culprit acts"
    for rank, run in enumerate((here, there)):
        assert run.verdict["outcome"] == "completed", run.verdict
        assert run.stdout(rank).endswith("ended 2\n")


def test_a_rank_of_another_node_that_sleeps_is_interrupted(train: Train) -> None:
    here, there = train(SLEEPS)
    assert here.named("hang") == []
    (hang,) = there.named("hang")
    assert hang["culprits"] == [1]
    assert [run.verdict["outcome"] for run in (here, there)] == ["completed"] * 2
    assert here.stdout(0).endswith("ended 2\n")


@pytest.mark.extended
def test_a_node_s_only_rank_that_keeps_the_gil_is_ended_and_the_others_go_on(
    train: Train,
) -> None:
    here, there = train(KEEPS_THE_GIL)
    assert [hang["action"] for hang in there.named("hang")][:2] == ["wake it", "end it"]
    (ended,) = there.named("hang-ended")
    assert ended["rank"] == 1
    assert here.verdict["outcome"] == "completed"
    assert here.stdout(0).endswith("ended 1\n")


@pytest.mark.extended
def test_without_restart_in_place_a_hang_ends_the_attempt_on_all_nodes(train: Train) -> None:
    here, there = train(SLEEPS, restart="process")
    for run in (here, there):
        assert run.verdict["outcome"] == "failed"
        assert "rank 1: step counter" in run.verdict["reason"]
    (fault,) = (each for each in here.named("fault") if each["on"])
    assert fault["rank"] == 1
    assert fault["how"].startswith("hangs: "), fault
    assert "rank 1: step counter" in fault["how"], fault


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        pytest.param(COMPILES, 0, id="a first step that compiles", marks=pytest.mark.extended),
        pytest.param(POLLS, 6, id="a declared checkpoint on another node"),
    ],
)
@pytest.mark.extended
def test_what_only_takes_long_is_left_alone(train: Train, fault: str, at: int) -> None:
    for run in train(fault, at=at):
        assert run.named("hang") == []
        assert run.named("restart") == []
        assert run.verdict["outcome"] == "completed"
        assert run.verdict["receipt"]["verdict"] == "healthy"
