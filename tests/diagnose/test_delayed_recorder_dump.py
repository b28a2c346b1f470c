"""A full recorder is dumped after the restart, and shows what it would have shown before it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclops import flight
from ncclops.record import snapshot_files
from tests.conftest import CompletedText, clean_environ
from tests.diagnose.conftest import read
from tests.lanes import IN_SCRIPT, Lane, lanes

Ncclops = Callable[..., CompletedText]

RANKS = 3
BEFORE = 600  # reductions: more than is dumped at once
# Rank 2 fails while the others wait. Then the recorder is filled over and over, for as long as it
# takes the rest to be written and more, or the job is done at once.
TRAINING = (
    IN_SCRIPT
    + """
import glob, sys, time
import torch.distributed as dist
dist.init_process_group(**lane)
first = not os.path.exists("faulted")

def reduce_gradients():
    dist.all_reduce(gradients := torch.ones(4, device=device))
    gradients.sum().item()  # a GPU's rank waits here

for step in range(BEFORE):
    reduce_gradients()
if first:
    if dist.get_rank() == 2:
        time.sleep(1)  # the others are in it by then
        open("faulted", "w").close()
        raise RuntimeError("out of the blue")
    reduce_gradients()
own, _ = dist.new_subgroups(1)
deadline = time.time() + float(os.environ["GO_ON_S"])
while time.time() < deadline:
    dist.all_reduce(torch.ones(4, device=device), group=own)
dist.destroy_process_group()
""".replace("BEFORE", str(BEFORE))
)
WAITED_IN = next(
    number
    for number, line in enumerate(TRAINING.splitlines(), 1)
    if line.startswith("    dist.all_reduce(gradients")
)


@lanes("nccl-eager", extended=("gloo",))
@pytest.mark.slow
@pytest.mark.parametrize("go_on_s", ["0", "2"])
@pytest.mark.extended
def test_the_ring_goes_on_meanwhile(
    ncclops: Ncclops, tmp_path: Path, go_on_s: str, lane: Lane
) -> None:
    """Whether the job ends before the rest is due, or pushes 30,000 records into the ring."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    options = ("--profile", lane.profile, "--nproc-per-node", str(RANKS), "--run-dir", "run")
    done = ncclops("launch", *options, script, env={"GO_ON_S": go_on_s})
    assert done.returncode == 0, done.stderr
    incident = tmp_path / "run" / "incidents" / "0"
    last_of = {}
    for rank in range(RANKS):
        directory = snapshot_files.rank_dir(incident, rank)
        entries = read(directory / snapshot_files.FLIGHT)["dump"]["entries"]
        assert {each["pg_id"] for each in entries} == {0}, "the next iteration's are left out"
        last = last_of[rank] = entries[-1]
        assert last["retired"] == (rank == 2), "the others waited in theirs"
        assert any(frame["name"] == "reduce_gradients" for frame in last["frames"])
        (world,) = read(directory / snapshot_files.GROUPS)
        assert world["last_op"]["pending"] == (rank != 2)
    reached = [last_of[rank]["collective_seq_id"] for rank in range(RANKS)]
    assert reached == [BEFORE + 1, BEFORE + 1, BEFORE]
    report = flight.analyze(incident)
    verdict = report.to_json()["verdict"]
    assert verdict["culprits"] == [2]
    waiting = next(side for side in report.findings[0].sides if side.role == "waiting")
    assert waiting.frame is not None and waiting.frame.line == WAITED_IN


# What a snapshot leaves for later: by the groups there are, and by what was recorded. Rank 1 of 2
# does nothing, so that what rank 0 starts with it does not end.
CHOICE = """
import json, os, sys, time
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # torch's own stand-in for another backend
from ncclops.capture.rank_snapshot import Identity, RankSnapshot

def look(label):
    snapshot = RankSnapshot(Identity(0, None), 0)
    snapshot.take_before_abort(60)
    found[label] = bool(snapshot.dumps)
    return snapshot

def reduce(times):
    for _ in range(times): dist.all_reduce(torch.ones(1), group=own)
    # Which operation is done, says the thread of the two that comes last to say so.
    time.sleep(0.1)
    dist.all_reduce(torch.ones(1), group=own)

rank, found = int(sys.argv[1]), {}
look("nothing")
store = "file://" + os.path.abspath("store")
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
if rank == 1:
    sys.stdin.read()
    os._exit(0)
own = dist.new_group([0], use_local_synchronization=True)
reduce(1)
look("few")
reduce(1000)
snapshot = look("many")
found["urgent at once"] = snapshot.is_urgent
reduce(400)
found["urgent after 400"] = snapshot.is_urgent
reduce(200)
found["urgent after 600"] = snapshot.is_urgent
snapshot.take_rest(60)
found["dumped"] = bool(snapshot.dumps)
found["urgent after the dump"] = snapshot.is_urgent
dist.all_reduce(torch.ones(1), async_op=True)
look("one under way")
dist.all_reduce(torch.ones(1), async_op=True)
look("two under way")
another = dist.new_group([0], backend="fake", use_local_synchronization=True)
reduce(1)
look("another backend")
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_what_is_left_for_later(tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", CHOICE, str(rank)],
            env=clean_environ() | {"TORCH_FR_BUFFER_SIZE": "2000"},
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with start(1) as idle, start(0) as busy:
        said, _ = busy.communicate(timeout=100)
        idle.communicate(timeout=100)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])  # Gloo prints, too
    assert found == {
        "nothing": True,
        "few": True,
        "many": False,
        "urgent at once": False,
        "urgent after 400": False,
        "urgent after 600": True,
        "dumped": True,
        "urgent after the dump": False,
        "one under way": False,
        "two under way": True,
        "another backend": True,
    }
