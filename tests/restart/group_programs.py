"""Programs of test_half_made_groups.py: torch's tables of groups when an iteration ends."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from scenarios import FAST, HANG, Worker

from ncclops import restart as inprocess


def cut_at(name: str) -> None:
    """Raise ``RankShouldRestart`` where this thread next calls the function ``name``.

    Or the method of a group: no profile function sees calls of such on Python 3.12.
    """
    restart = inprocess.monitor_thread.RankShouldRestart(f"cut at {name}")
    if (method := vars(dist.ProcessGroup).get(name)) is not None:

        def fail(*_arguments: Any) -> None:
            setattr(dist.ProcessGroup, name, method)
            raise restart

        setattr(dist.ProcessGroup, name, fail)
        return

    def look(frame: FrameType, event: str, argument: Any) -> None:
        called = frame.f_code.co_name if event == "call" else getattr(argument, "__name__", None)
        if event in ("call", "c_call") and called == name:
            sys.setprofile(None)
            raise restart

    sys.setprofile(look)


def cut(worker: Worker) -> Any:
    """Rank 0 is cut in the making or the end of its groups, at the function ``at``."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("entered", iteration=call.iteration)
        if call.iteration == 0 and worker.rank == 0:
            cut_at(worker.parameters["at"])
        worker.join()
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=pair)
        dist.destroy_process_group(pair)
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


class Eager(dist.ProcessGroup):
    """A backend that is connected while the group is made, and waits in C for its peers.

    As NCCL with ``device_id=``: nothing but its own ``abort`` ends that.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.aborted = threading.Event()

    def _set_group_desc(self, _description: str) -> None:
        """Where torch connects NCCL: the last step before the group is in its tables."""
        while not self.aborted.is_set():
            try:
                time.sleep(0.05)
            except BaseException:  # noqa: BLE001 - C code does not see it
                continue
        raise RuntimeError("aborted")

    def abort(self) -> None:
        self.aborted.set()


def connecting_eagerly(worker: Worker) -> Any:
    """Rank 0 waits in the making of its group for a peer that has failed."""
    dist.Backend.register_backend(
        "eager", lambda _store, rank, size, _timeout: Eager(rank, size), devices=["cpu"]
    )

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("entered", iteration=call.iteration)
        if call.iteration == 0:
            if worker.rank == 1:
                time.sleep(0.5)  # nothing announces that the other rank waits in it
                raise ValueError("boom")
            dist.init_process_group("eager")
        worker.join()
        return worker.finish(call)

    return worker.wrap(main, **HANG)()


def ending_with_a_reducer(worker: Worker) -> Any:
    """DDP's reducer is the last to hold the group, while a worker of the group needs the GIL."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        weights = [torch.nn.Parameter(torch.ones(1))]
        of_model = dist.Reducer(weights, [[0]], [1 << 20], dist.group.WORLD)
        called = threading.Event()

        def linger(_: torch.futures.Future[list[torch.Tensor]]) -> None:
            called.set()
            time.sleep(1.0)  # nothing announces that the other thread waits in the destructor

        if worker.rank == 1:
            time.sleep(0.5)  # what is finished already calls back at once, and not from the worker
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(linger)
        called.wait()
        dist.destroy_process_group()
        del of_model
        return f"iteration {call.iteration}"

    return worker.wrap(main, **HANG)()


def ending_late(worker: Worker) -> Any:
    """A worker thread of the first group is busy until the function is entered again."""
    entered_again = threading.Event()

    def main(call: inprocess.CallWrapper) -> str:
        if call.iteration:
            entered_again.set()
        worker.join()
        if call.iteration == 0:
            called = threading.Event()

            def linger(_: torch.futures.Future[list[torch.Tensor]]) -> None:
                called.set()
                entered_again.wait(100)

            if worker.rank == 1:
                time.sleep(0.5)  # see ending_with_a_reducer
            dist.all_reduce(torch.ones(1), async_op=True).get_future().then(linger)
            called.wait()
            if worker.rank == 0:
                raise ValueError("boom")
            time.sleep(100)
        return worker.finish(call)

    return worker.wrap(main, **HANG)()


def made_anew_by_the_script(worker: Worker) -> Any:
    """Rank 0 leaves its group and makes the next, for which rank 1 has to be out of the first."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if worker.rank == 1:
            try:
                dist.barrier()
            except RuntimeError:
                worker.note("left")
        dist.destroy_process_group()
        worker.join()
        return worker.finish(call)

    return worker.wrap(main, **HANG)()
