"""Real jobs that fail in the way a test asks for, and what they leave behind."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.lanes import GLOO, IN_SCRIPT, Lane
from tests.launch.conftest import Background, background  # noqa: F401 - a fixture

# Generous: a deadline says "stuck", not "slow".
DEADLINE_S = 100.0

PROFILE = """
description = "For tests: hangs are found within seconds."
kind = "lane"
nodes = "any"
extends = "{lane}"
[timeouts]
soft = "{soft}"
hard = "{hard}"
process_group = "10m"
stop_grace = "2s"
"""

# Seven reductions in a function of its own; FAULT=kind:rank happens once, before the last one. Of
# several faults each happens after the restart that the one before has led to, and not before its
# snapshots are written, which goes on beside the training for a moment.
TRAINING = (
    IN_SCRIPT
    + """
import ctypes, glob, os, select, signal, sys, time
import torch, torch.distributed as dist
faults, before = os.environ["FAULT"].split(), len(glob.glob("faulted*"))
kind, victim = faults[before].split(":") if before < len(faults) else ("none", "-1")
dist.init_process_group(**lane)

def reduce_gradients():
    dist.all_reduce(gradients := torch.ones(4, device=device))
    gradients.sum().item()  # a GPU's rank waits here

def load_batch():
    if kind == "raise": raise RuntimeError("out of the blue")
    if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    while kind == "hang" and not os.path.exists("go-on"): time.sleep(0.1)
    if kind == "crash": ctypes.string_at(0)
    if kind == "gil": ctypes.PyDLL(None).sleep(1000)

for step in range(7):
    if step == 6 and before: select.select([], [], [], 1)
    if step == 6 and dist.get_rank() == int(victim):
        open(f"faulted{before or ''}", "w").close()
        load_batch()
    reduce_gradients()
print("finished", flush=True)
dist.destroy_process_group()
"""
)
LINE_OF = {
    name: number
    for number, line in enumerate(TRAINING.splitlines(), 1)
    for name in (
        "raise Runtime",
        "time.sleep",
        "sleep(1000)",
        "string_at",
        "dist.all_reduce",
        ".item",
    )
    if name in line
}


def write_training(directory: Path) -> Path:
    path = directory / "train.py"
    path.write_text(TRAINING)
    return path


def write_profile(directory: Path, soft: str, hard: str, lane: Lane = GLOO) -> Path:
    path = directory / "forensics.toml"
    path.write_text(PROFILE.format(lane=lane.profile, soft=soft, hard=hard))
    return path


@pytest.fixture
def training(tmp_path: Path) -> Path:
    return write_training(tmp_path)


@pytest.fixture
def profile(tmp_path: Path, lane: Lane) -> Callable[[str, str], Path]:
    """``profile(soft, hard)`` writes a profile with these timeouts."""
    return partial(write_profile, tmp_path, lane=lane)


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition``; fails the test when there is none in time."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {DEADLINE_S} s for {what}")
        time.sleep(0.05)  # other processes' files announce nothing
    return value


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def ended(process: subprocess.Popen[bytes]) -> Iterator[int]:
    yield process.wait(DEADLINE_S)
