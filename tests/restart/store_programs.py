"""Programs of test_store_connection.py: a rank whose connections to the store break."""

from __future__ import annotations

import os
import time
from typing import Any

import fault_programs
import torch.distributed as dist
from scenarios import FAST, Worker, seconds

from ncclops import restart as inprocess


def timing(worker: Worker) -> dict[str, Any]:
    """A rank waits for an answer of the store for 0.4 of the barrier's timeout."""
    barrier_s = worker.parameters.get("barrier_s", 60)
    return {
        **FAST,
        "soft_timeout": seconds(barrier_s / 3),
        "hard_timeout": seconds(barrier_s / 2),
        "heartbeat_timeout": seconds(barrier_s / 6),
        "barrier_timeout": seconds(barrier_s),
    }


def working(worker: Worker) -> Any:
    """All work until the file ``go`` is there; rank ``faulty`` then raises, once.

    With ``goes_on`` they then work until the file ``end`` is there.
    """

    def main(call: inprocess.CallWrapper) -> str:
        world = worker.join()
        worker.note("entered", iteration=call.iteration, world=world)
        while call.iteration == 0 and not (worker.directory / "go").exists():
            time.sleep(0.05)
        if call.iteration == 0 and worker.rank == worker.parameters.get("faulty"):
            raise ValueError("boom")
        while worker.parameters.get("goes_on") and not (worker.directory / "end").exists():
            time.sleep(0.05)
        dist.barrier()
        return worker.finish(call)

    try:
        return worker.wrap(main, **timing(worker))()
    except inprocess.exception.StoreGone as error:
        worker.note("cut off", error=str(error))
        while worker.parameters.get("lingers") and not (worker.directory / "end").exists():
            time.sleep(0.05)
        raise


def waiting_in_the_barrier(worker: Worker) -> Any:
    """The one of fault_programs, with time for a connection to be made again."""
    return fault_programs.waiting_in_the_barrier(worker, timing(worker))


def finishing(worker: Worker) -> Any:
    """All are through the function but rank 0, until the file ``go`` is there."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        dist.destroy_process_group()
        worker.note("entered", iteration=call.iteration, pid=os.getpid())
        while worker.rank == 0 and not (worker.directory / "go").exists():
            time.sleep(0.02)
        return f"iteration {call.iteration}"

    return worker.wrap(main, **timing(worker))()
