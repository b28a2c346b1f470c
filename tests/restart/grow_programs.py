"""Functions that lose ranks and get them back."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
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
    socket.setdefaulttimeout(10)  # as many scripts do; it is no affair of ours
    chosen = {} if assignment is None else {"rank_assignment": ASSIGNMENTS[assignment]}
    grow = None if grow_s is None else timedelta(seconds=grow_s)

    @restart.Wrapper(**LIMITS, **chosen, grow_timeout=grow)
    def function(call: restart.CallWrapper) -> tuple[int, int, int, int]:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        # A rank that is killed while its peers send to it may leave one in Gloo for the group's
        # timeout (docs/restart.md, Limits): ranks are killed after this, and mostly sleep, also
        # where many processes share the cores.
        dist.barrier()
        note("in", iteration=call.iteration, number=rank, size=size, pid=os.getpid())
        over = torch.zeros(1)
        while not over.item():
            # One rank looks, so that all stop after the same step.
            over = torch.tensor([float(rank == 0 and Path(stop).exists())])
            dist.all_reduce(over)
            time.sleep(0.2)
            if rank == 0:
                os.environ["NCCLOPS_STORE_PREFIX"] = "the function's"  # which changes no agreement
        dist.destroy_process_group()
        return call.iteration, rank, size, os.getpid()

    return function()


class Snapshots:
    """None. One is made for each session, between the end of the last one and the first message
    of this one to the other ranks: that is the moment in which ``meanwhile`` is called."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        meanwhile()

    def outside_view(self) -> None: ...
    def iteration_begins(self) -> None: ...
    def function_left(self, error: BaseException) -> None: ...
    def take(self, directory: Path) -> None: ...
    def record_lost(self, directory: Path, rank: int, reason: str) -> None: ...
    def close(self, timeout_s: float) -> None: ...


def lost_while_joining(directory: str, ends: bool) -> Any:
    """Rank 1 is lost in iteration 0. While the others join anew with its new process, rank 2 ends,
    or waits for the file ``go``; nothing but what the new processes say shows that one has ended.
    """
    after = Path(directory)
    sessions = itertools.count(int(os.environ.get("NCCLOPS_RETURNING", "0")))

    def meanwhile() -> None:
        joins_anew = next(sessions) == 1 and os.environ["RANK"] == "2"
        if not joins_anew or (after / "joining").exists():
            return
        (after / "joining").touch()
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        while not (after / "go").exists():
            time.sleep(0.01)

    hours = {
        "soft_timeout": timedelta(hours=1),
        "hard_timeout": timedelta(hours=2),
        "heartbeat_timeout": timedelta(hours=2),
        "barrier_timeout": timedelta(hours=4),
    }

    @restart.Wrapper(
        **LIMITS | hours,
        grow_timeout=timedelta(hours=1),
        incident_dir=str(after / "incidents"),
        snapshots=lambda rank: Snapshots(meanwhile),
    )
    def function(call: restart.CallWrapper) -> int:
        dist.init_process_group("gloo")
        note("in", iteration=call.iteration, pid=os.getpid())
        dist.barrier()
        if call.iteration == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        dist.destroy_process_group()
        return call.iteration

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
