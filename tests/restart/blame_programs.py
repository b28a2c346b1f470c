"""Programs of test_blame.py: faults of which another rank shows the effect first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from scenarios import FAST, HANG, Worker, seconds

from ncclops import restart as inprocess


class TrainingError(Exception):
    """A library's own, around whatever went wrong."""


def step() -> None:
    dist.all_reduce(torch.ones(1))


def beginning(worker: Worker) -> Any:
    """Rank 1 begins what ends iteration 0, in the way ``how``; the others show it first."""
    how = worker.parameters["how"]

    def begin(call: inprocess.CallWrapper) -> str | None:
        if how == "skips a step":
            dist.destroy_process_group()
            return "done first"
        if how == "skips a step and keeps its groups":
            return "done first"
        if how == "cleans up":
            try:
                raise ValueError("boom")
            finally:
                dist.destroy_process_group()
                time.sleep(0.5)
        if how == "sleeps":
            time.sleep(600)
        if how == "waits for a lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if how == "holds the GIL":
            ctypes.PyDLL(None).sleep(5)
        return None

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("entered", iteration=call.iteration)
        if call.iteration == 0:
            if worker.rank == 1:
                value = begin(call)
                if value is not None:
                    return value
            try:
                while True:
                    step()
            except RuntimeError as error:
                raise TrainingError("a step failed") from error
        step()
        return worker.finish(call)

    return worker.wrap(main, **{**HANG, "hard_timeout": seconds(20)})()


def polling(worker: Worker) -> Any:
    """Rank 1 raises, again and again; rank 0 polls a queue and mostly is in an ``except``."""
    items: queue.Queue[int] = queue.Queue()

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration < 3:
            dist.barrier()
            if worker.rank == 1:
                time.sleep(0.2)
                raise ValueError("boom")
            while True:
                try:
                    items.get(timeout=0.001)
                except queue.Empty:
                    with contextlib.suppress(KeyError):
                        time.sleep(0.02)  # back off
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def outliving(worker: Worker) -> Any:
    """Rank 1 outlives the SIGTERM of the hard timeout, and is killed later by something else."""
    signal.signal(signal.SIGTERM, lambda *_: worker.note("terminated"))

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("entered", iteration=call.iteration)
        if call.iteration == 0 and worker.rank == 1:
            ctypes.PyDLL(None).sleep(8)
        if call.iteration == 1:
            for _ in range(20):
                time.sleep(0.1)
                dist.barrier()
            if worker.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **{**HANG, "termination_grace_time": seconds(6)})()
