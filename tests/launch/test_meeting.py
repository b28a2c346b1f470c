"""A rank that does not come to a process group is named, with its host and what it is doing."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.record import incident_record
from ncclops.record.paths import RunPaths
from tests.conftest import LIMIT_S, free_port
from tests.lanes import IN_SCRIPT, lanes
from tests.launch.conftest import Background, Run

pytestmark = pytest.mark.slow

# One rank is elsewhere. Rank 0 waits for it for seconds, and no sooner than rank 2 has come.
TRAINING = (
    IN_SCRIPT
    + """
import time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist

def limit():
    Path(f"here-{rank}").touch()
    while rank == 0 and not Path("here-2").exists():
        time.sleep(0.01)
    return timedelta(seconds=5 if rank == 0 else 100)

def be_absent():
    Path("absent").touch()
    time.sleep(1000)

rank, absent = int(os.environ["RANK"]), int(os.environ["ABSENT"])
if absent == 3:  # of a group of three among four
    dist.init_process_group(**lane)
if rank == absent:
    be_absent()
while not Path("absent").exists():
    time.sleep(0.01)
if absent == 3:
    dist.new_group([0, 2, 3], timeout=limit(), group_desc="mesh_dp")
    Path("not-a-member").touch()
    time.sleep(1000)
dist.init_process_group(**lane, timeout=limit())
"""
)
HOST = socket.gethostname()


def check(run: Run, absent: int, script: Path, what: str) -> None:
    """All that is said of the run is about the absent rank."""
    story = run.verdict["story"]
    line = TRAINING.splitlines().index("    time.sleep(1000)") + 1
    assert re.fullmatch(
        rf"rank {absent} on {HOST} did not come to (?:{what}), (?:for|in) which .* waited .*:"
        rf" it was at {re.escape(str(script))}:{line} in be_absent",
        story["what"],
    )
    assert (story["rank"], story["host"], story["class"]) == (absent, HOST, "store-rendezvous")
    assert story["code"][-1]["function"] == "be_absent"
    assert run.verdict["classification"]["signature"] == "absent-rank"
    assert re.search("the absent rank was doing|what keeps rank 3", story["next_steps"][0])


@lanes("nccl", extended=("gloo", "nccl-eager"))
def test_a_rank_that_does_not_come_to_the_default_group(
    background: Callable[..., Background],
    script: Callable[[str], Path],
    quick_profile: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ABSENT", "1")
    path = script(TRAINING)
    options = ["--profile", quick_profile, "--nproc-per-node", "3", "--restart", "process"]
    options += ["--warm-start"]
    assert background("launch", *options, "--run-dir", "run", path).wait(LIMIT_S) == 1
    where = r"the making of the default group \(init_process_group\)"
    check(Run(tmp_path / "run"), 1, path, where)
    record = incident_record.read(RunPaths(tmp_path / "run").incident(0))
    assert record is not None
    assert (record.first_faulty_rank != 1, record.absent_ranks) == (True, [1])


@pytest.mark.extended
def test_a_rank_of_another_node_that_does_not_come_to_a_group(
    background: Callable[..., Background],
    script: Callable[[str], Path],
    quick_profile: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node's other rank tells what it is doing; who is no member does not wait."""
    monkeypatch.setenv("ABSENT", "3")
    path, port = script(TRAINING), str(free_port())
    agents = [
        background(
            *("launch", "--profile", quick_profile, "--run-dir", f"node-{node}", "--nnodes", "2"),
            *("--node-rank", str(node), "--nproc-per-node", "2", "--master-addr", "127.0.0.1"),
            *("--master-port", port, "--restart", "process", "--warm-start", path),
        )
        for node in range(2)
    ]
    assert [agent.wait(LIMIT_S) for agent in agents] == [1, 1]
    assert (tmp_path / "not-a-member").exists()
    # Ranks of both nodes raise at once; where one is ended before it does, its node tells of a
    # collective.
    for node in range(2):
        check(Run(tmp_path / f"node-{node}"), 3, path, "the making of group mesh_dp|a collective")
