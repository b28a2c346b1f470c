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

import torch.distributed as dist
from scenarios import FAST, HANG, Worker, seconds

from ncclops import restart as inprocess
from ncclops.restart._store import connections as _connections
from ncclops.restart.state import FrozenState
from ncclops.restart.store import another_connection


class TrainingError(Exception):
    """A library's own, around whatever went wrong."""


def step(worker: Worker) -> None:
    total = worker.ones()
    dist.all_reduce(total)
    total.item()  # where a rank waits on a GPU


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
        while how == "stops pinging":
            time.sleep(0.01)
        return None

    def main(call: inprocess.CallWrapper) -> str:
        if how == "stops pinging" and worker.rank == 1 and call.iteration == 0:
            # The others are the first to exceed theirs.
            call.begin_phase("step", soft_timeout=seconds(5), hard_timeout=seconds(20))
            call.ping()
        worker.join()
        worker.note("entered", iteration=call.iteration)
        if call.iteration == 0:
            if worker.rank == 1:
                value = begin(call)
                if value is not None:
                    return value
            try:
                while True:
                    step(worker)
            except RuntimeError as error:
                raise TrainingError("a step failed") from error
        step(worker)
        return worker.finish(call)

    return worker.wrap(main, **{**HANG, "hard_timeout": seconds(20)})()


def waiting_on_the_device(worker: Worker) -> Any:
    """Rank 1 hangs. The main threads of the others wait for their GPUs, which wait for it: ``how``
    says in what."""
    how = worker.parameters["how"]

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        # Between each two ranks a communicator, before anything hangs.
        received = worker.ones()
        for first, second in ((0, 1), (1, 2)):
            if worker.rank == first:
                dist.send(received, second)
            elif worker.rank == second:
                dist.recv(received, first)
        received.item()
        for _ in range(4):  # more collectives than messages
            step(worker)
        if call.iteration == 0:
            if worker.rank == 1:
                time.sleep(600)
            if how == "a message":
                dist.recv(received, 1)
                received.item()
            else:
                dist.all_reduce(received)
                dist.destroy_process_group()
        step(worker)
        return worker.finish(call)

    limits = {"hard_timeout": seconds(20)}
    if worker.rank == 1 and how == "a message":  # the others are the first to exceed theirs
        limits["soft_timeout"] = seconds(5)
    return worker.wrap(main, **{**HANG, **limits})()


def reporting_late(worker: Worker) -> Any:
    """Rank 1 skips a step. Rank 2, which waits, records its soft timeout only on its way to the
    barrier. Rank 0 waits, too, and with ``fails`` fails as soon as that timeout is reported."""
    reported = worker.directory / "reported"
    left = threading.Event()

    def slowly(store: dist.Store, address: str | None) -> dist.Store:
        if threading.current_thread().name == "ncclops-reporter" and worker.rank == 2:
            reported.touch()
            left.wait()
        return another_connection(store, address)

    class Finalize(inprocess.finalize.Finalize):
        def __call__(self, state: FrozenState) -> FrozenState:
            left.set()
            time.sleep(0.5)  # for the reporter, which does not announce that it has recorded it
            return state

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0:
            if worker.rank == 1:
                return "done first"
            if worker.rank == 0 and worker.parameters["fails"]:
                while not reported.exists():
                    time.sleep(0.01)
                raise RuntimeError("Connection closed by peer")
        step(worker)
        return worker.finish(call)

    _connections.another_connection = slowly  # type: ignore[assignment,attr-defined] # looked up there
    limits = {"hard_timeout": seconds(40)}
    if worker.rank == 0:
        limits["soft_timeout"] = seconds(30)
    return worker.wrap(main, finalize=Finalize(), **{**HANG, **limits})()


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
