"""Functions that the tests of the harness run on ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ncclops import restart as inprocess
from ncclops.testing import note, place


def _seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


# Quick to notice what the tests wait for; a healthy rank of a busy machine may be slow for seconds.
SHORT: dict[str, Any] = {
    "soft_timeout": _seconds(4),
    "hard_timeout": _seconds(8),
    "heartbeat_timeout": _seconds(5),
    "monitor_process_interval": _seconds(0.1),
    "progress_watchdog_interval": _seconds(0.1),
    "monitor_thread_interval": _seconds(0.2),
    "heartbeat_interval": _seconds(0.1),
    "termination_grace_time": _seconds(0.5),
}


@inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=9))
def train(checkpoint: Path, steps: int, pause_s: float = 0, rank_0_is_late_s: float = 0) -> float:
    """A training whose result depends neither on faults nor on the number of ranks.

    ``rank_0_is_late_s``: in each step, so that all others wait for it, with nothing on its way.
    """
    time.sleep(pause_s)
    dist.init_process_group("gloo")
    step, weight = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 0.0)
    while step < steps:
        if dist.get_rank() == 0:
            time.sleep(rank_0_is_late_s)
        place("step")
        gradient = torch.tensor([float(step % 7)])
        dist.all_reduce(gradient)
        step, weight = step + 1, weight + float(gradient) / dist.get_world_size()
        if dist.get_rank() == 0:
            draft = checkpoint.with_suffix(".draft")
            draft.write_text(json.dumps([step, weight]))
            draft.replace(checkpoint)
        dist.barrier()
    dist.destroy_process_group()
    return weight


class Greeting(str):
    """A value of a class of this module."""


def greet(name: Greeting) -> tuple[Greeting, int, str | None]:
    rank = int(os.environ["RANK"])
    note("greeted", name=name, large="x" * 300_000)
    print(f"hello from rank {rank}")
    return Greeting(f"hello, {name}"), rank, os.environ.get("SPOKEN")


def fail() -> None:
    try:
        raise KeyError("first")
    except KeyError:
        if os.environ["RANK"] == "1":
            sys.exit(5)
        raise ValueError("second") from None


def stay() -> None:
    note("there", pid=os.getpid())
    time.sleep(600)


def stay_with_a_child() -> None:
    child = subprocess.Popen(["sleep", "600"])
    note("there", pids=(os.getpid(), child.pid))
    time.sleep(600)


def leave_a_process_behind() -> int:
    """A child with a session of its own, as a careless launcher's."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def pass_places() -> None:
    for _ in range(3):
        place("here")
