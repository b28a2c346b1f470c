"""Functions that lose ranks and get them back."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ncclops import restart
from ncclops.restart.rank_assignment import (
    Layer,
    LayerFlag,
    MaxActiveWorldSize,
    ShiftRanks,
    Tree,
)
from ncclops.testing import note

LIMITS: dict[str, Any] = {
    "soft_timeout": timedelta(seconds=30),
    "hard_timeout": timedelta(seconds=40),
    "heartbeat_timeout": timedelta(seconds=20),
    "barrier_timeout": timedelta(seconds=60),
    "completion_timeout": timedelta(seconds=60),
}


def _own(state: restart.State) -> int:
    return state.rank


ASSIGNMENTS: dict[str, Any] = {
    "reserve": restart.Compose(MaxActiveWorldSize(2), ShiftRanks()),
    "tree": Tree([Layer(key_or_fn="job"), Layer(key_or_fn=_own, flag=LayerFlag.RESERVE)]),
}


def train(grow_s: float | None, stop: str, assignment: str | None = None) -> Any:
    """Reduce until the file ``stop`` is there: the iteration, the rank and the world size then."""
    chosen = {} if assignment is None else {"rank_assignment": ASSIGNMENTS[assignment]}
    grow = None if grow_s is None else timedelta(seconds=grow_s)

    @restart.Wrapper(**LIMITS, **chosen, grow_timeout=grow)
    def function(call: restart.CallWrapper) -> tuple[int, int, int, int]:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        note("in", iteration=call.iteration, number=rank, size=size, pid=os.getpid())
        over = torch.zeros(1)
        while not over.item():
            # One rank looks, so that all stop after the same step.
            over = torch.tensor([float(rank == 0 and Path(stop).exists())])
            dist.all_reduce(over)
            time.sleep(0.005)
        dist.destroy_process_group()
        return call.iteration, rank, size, os.getpid()

    return function()


def return_one_by_one(stop: str) -> Any:
    """Rank 0 returns at once, the others when the file ``stop`` is there; no collectives."""
    logging.basicConfig(level=logging.INFO)  # the new process says that it waits

    @restart.Wrapper(**LIMITS, grow_timeout=timedelta(0))
    def function(call: restart.CallWrapper) -> int:
        note("in", iteration=call.iteration, number=int(os.environ["RANK"]))
        while os.environ["RANK"] != "0" and not Path(stop).exists():
            time.sleep(0.01)
        note("returns")
        return call.iteration

    return function()


def inside_another() -> str:
    """What a wrapped function inside another one says of ``grow_timeout``."""

    @restart.Wrapper(**LIMITS)
    def outer() -> str:
        try:
            restart.Wrapper(**LIMITS, grow_timeout=timedelta(0))(print)()
        except ValueError as error:
            return str(error)
        return "accepted"

    return outer() or ""
