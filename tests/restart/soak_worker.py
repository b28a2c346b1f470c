"""What each rank of a soak does: a toy training with checkpoints, and suffering its faults."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenarios import HANG, Worker, gil_holding_sleep, seconds

from ncclops import restart as inprocess
from ncclops.restart.state import FrozenState


def soak(worker: Worker) -> Any:
    """Train for ``steps`` steps; each of this rank's ``faults`` strikes once.

    The result depends neither on the number of ranks nor, therefore, on the faults.
    """
    faults = Faults(worker)
    steps, hard_s = worker.parameters["steps"], worker.parameters["hard_s"]
    checkpoint = Checkpoint(worker.directory / "checkpoint.json")

    def train(call: inprocess.CallWrapper) -> float:
        worker.note("holds", iteration=call.iteration, **holdings())
        dist.init_process_group("gloo")
        start, weight = checkpoint.load()
        for step in range(start, steps):
            faults.step = step
            faults.strike("step")
            gradient = torch.tensor([float(step % 7)])
            dist.all_reduce(gradient)
            faults.strike("reduced")
            weight += float(gradient) / dist.get_world_size()
            if dist.get_rank() == 0:
                with call.atomic():
                    faults.strike("saving")
                    checkpoint.save(step + 1, weight)
            time.sleep(0.005)
        dist.barrier()
        dist.destroy_process_group()
        return weight

    limit = inprocess.initialize.RetryController(max_iterations=200)
    timing = {**HANG, "hard_timeout": seconds(hard_s), "barrier_timeout": seconds(2 * hard_s)}
    return worker.wrap(
        train,
        initialize=inprocess.Compose(limit, faults.callback(inprocess.initialize.Initialize)),
        finalize=faults.callback(inprocess.finalize.Finalize),
        health_check=faults.callback(inprocess.health_check.HealthCheck),
        **timing,
    )()


class Faults:
    """This rank's part of the schedule.

    A fault is ``[step, rank, kind, place]``: it strikes ``rank`` when it first comes to ``place``
    at or after ``step``.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._waiting = [fault for fault in worker.parameters["faults"] if fault[1] == worker.rank]
        self.step = 0

    def strike(self, place: str) -> None:
        """Suffer what is due at ``place``."""
        for fault in self._waiting:
            step, _, kind, where = fault
            if where == place and self.step >= step:
                self._waiting.remove(fault)
                self._worker.note("strike", kind=kind, place=place)
                _suffer(kind)

    def callback(self, base: type) -> Any:
        """An instance of the callback class ``base``, which is a place named like its module."""
        place = base.__module__.rpartition(".")[2]

        def strike(_: Any, state: FrozenState) -> FrozenState:
            self.strike(place)
            return state

        return type(f"Striking{base.__name__}", (base,), {"__call__": strike})()


def _suffer(kind: str) -> None:
    match kind:
        case "exception":
            raise ValueError("soak")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(600)
        case "gil":
            gil_holding_sleep(600)
        case _:
            raise AssertionError(kind)


class Checkpoint:
    """The step to go on with and the weight, written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[int, float]:
        """The last one, or the beginning."""
        if not self._path.exists():
            return 0, 0.0
        step, weight = json.loads(self._path.read_text())
        return step, weight

    def save(self, step: int, weight: float) -> None:
        """Replace the last one."""
        draft = self._path.with_suffix(".tmp")
        draft.write_text(json.dumps([step, weight]))
        draft.replace(self._path)


def holdings() -> dict[str, int]:
    """What this process holds of that which leaks: descriptors, threads, shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "segments": sum("/dev/shm/" in line or "/memfd:" in line for line in maps),
    }
