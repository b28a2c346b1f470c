"""A full recorder is dumped after the restart, and tells what it would have told before it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclops import flight
from ncclops.forensics import layout
from tests.conftest import CompletedText, clean_environ
from tests.forensics.conftest import read

Ncclops = Callable[..., CompletedText]

RANKS = 4
BEFORE = 600  # reductions: more than is dumped at once
# Rank 2 fails while the others wait. Then the recorder is filled over and over, for as long as it
# takes the rest to be written and more, or the job is done at once.
TRAINING = """
import glob, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
first = not os.path.exists("faulted")

def reduce_gradients():
    dist.all_reduce(torch.ones(4))

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
    dist.all_reduce(torch.ones(4), group=own)
dist.destroy_process_group()
""".replace("BEFORE", str(BEFORE))
WAITED_IN = next(
    number
    for number, line in enumerate(TRAINING.splitlines(), 1)
    if line == "    dist.all_reduce(torch.ones(4))"
)


@pytest.mark.slow
@pytest.mark.parametrize("go_on_s", ["0", "2"])
def test_the_ring_goes_on_meanwhile(ncclops: Ncclops, tmp_path: Path, go_on_s: str) -> None:
    """Whether the job ends before the rest is due, or pushes 30,000 records into the ring."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    options = ("--profile", "local-cpu", "--nproc-per-node", str(RANKS), "--run-dir", "run")
    done = ncclops("launch", *options, script, env={"GO_ON_S": go_on_s})
    assert done.returncode == 0, done.stderr
    incident = tmp_path / "run" / "incidents" / "0"
    last_of = {}
    for rank in range(RANKS):
        directory = layout.rank_dir(incident, rank)
        entries = read(directory / layout.FLIGHT)["dump"]["entries"]
        assert {each["pg_id"] for each in entries} == {0}, "the next iteration's are left out"
        last = last_of[rank] = entries[-1]
        assert last["retired"] == (rank == 2), "the others waited in theirs"
        assert any(frame["name"] == "reduce_gradients" for frame in last["frames"])
        (world,) = read(directory / layout.GROUPS)
        assert world["last_op"]["pending"] == (rank != 2)
    reached = [last_of[rank]["collective_seq_id"] for rank in range(RANKS)]
    assert reached == [BEFORE + 1, BEFORE + 1, BEFORE, BEFORE + 1]
    report = flight.analyze(incident)
    verdict = report.to_json()["verdict"]
    assert verdict["culprits"] == [2]
    waiting = next(side for side in report.findings[0].sides if side.role == "waiting")
    assert waiting.frame is not None and waiting.frame.line == WAITED_IN


# What a picture leaves for later: by the groups there are, and by how much was recorded.
CHOICE = """
import json, os
import torch, torch.distributed as dist
from ncclops.forensics.picture import Identity, Picture

def look(label):
    picture = Picture(Identity(0, None), 0)
    picture.take_before_abort(60)
    found[label] = bool(picture.dumps)
    return picture

found = {}
look("nothing")
store = "file://" + os.path.abspath("store")
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
look("few")
for _ in range(1000): dist.all_reduce(torch.ones(1))
picture = look("many")
found["urgent at once"] = picture.is_urgent
for _ in range(400): dist.all_reduce(torch.ones(1))
found["urgent after 400"] = picture.is_urgent
for _ in range(200): dist.all_reduce(torch.ones(1))
found["urgent after 600"] = picture.is_urgent
picture.take_rest(60)
found["dumped"] = bool(picture.dumps)
found["urgent after the dump"] = picture.is_urgent
dist.new_group([0], backend="fake")
look("another backend")
print(json.dumps(found))
"""


def test_what_is_left_for_later(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHOICE.replace("import json", FAKE)],
        env=clean_environ() | {"TORCH_FR_BUFFER_SIZE": "2000"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # Gloo prints, too
    assert found == {
        "nothing": True,
        "few": True,
        "many": False,
        "urgent at once": False,
        "urgent after 400": False,
        "urgent after 600": True,
        "dumped": True,
        "urgent after the dump": False,
        "another backend": True,
    }


# torch's own stand-in for a backend that is not Gloo; importing it registers it.
FAKE = "import torch.testing._internal.distributed.fake_pg\nimport json"
