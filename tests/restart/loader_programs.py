"""Programs of test_data_loaders.py: a restart finds ranks in the middle of data loaders."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from scenarios import FAST, Worker
from torch.utils.data import DataLoader, Dataset

from ncclops import restart as inprocess


class Numbers(Dataset[torch.Tensor]):
    """Item i is i; from ``busy_from`` on, loading one takes for ever."""

    def __init__(self, busy_from: int = 10**6) -> None:
        self.busy_from = busy_from

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.busy_from:
            time.sleep(600)
        return torch.tensor(index)


def loader(how: str, **options: Any) -> DataLoader[torch.Tensor]:
    """With two workers."""
    busy_from = 12 if how == "busy" else 10**6
    # not left to the default, which is fork up to Python 3.13 and forkserver from 3.14 on
    options["multiprocessing_context"] = how if how in ("spawn", "forkserver") else "fork"
    return DataLoader(Numbers(busy_from), batch_size=2, num_workers=2, **options)


class Trainer:
    """Its loader is part of a reference cycle, as in many a library."""

    loader: DataLoader[torch.Tensor] | None = None  # of the class, in one of the variants

    def __init__(self, loader: DataLoader[torch.Tensor]) -> None:
        self.batches = iter(loader)
        self.callback = self.next  # the cycle

    def next(self) -> torch.Tensor:
        return next(self.batches)


def batches_of(how: str) -> Iterator[torch.Tensor]:
    """What an iteration loads from; iterators are held by it, or by something that it makes."""
    if how == "persistent":
        kept = loader(how, persistent_workers=True)
        yield from kept
    elif how in ("cycle", "busy"):
        trainer = Trainer(loader(how))
        while True:
            yield trainer.callback()
    elif how == "several":
        one, other = loader(how), loader(how, persistent_workers=True)
        pair: list[Any] = [iter(one), iter(other)]
        pair.append(pair)  # a cycle
        for first, second in zip(*pair[:2], strict=True):
            yield first + second
    elif how == "class":
        Trainer.loader = loader(how, persistent_workers=True)
        yield from Trainer.loader
    else:
        yield from loader(how)


def iterations(worker: Worker) -> Any:
    """Rank 1 raises when both ranks have loaded some batches, in the iterations 0 and 1."""
    how = worker.parameters["how"]
    ended: list[Any] = []

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("entered", iteration=call.iteration)
        worker.join()
        if call.iteration < 2:
            gloo = dist.new_group()
            batches = loader(how) if how == "plain" else batches_of(how)
            for number, _ in enumerate(batches):
                if number == 0:
                    ended.extend(set(multiprocessing.active_children()) - set(ended))
                if number == 3:
                    dist.barrier(group=gloo)
                    if worker.rank == 1:
                        raise ValueError("boom")
        if how == "class":
            Trainer.loader = None
        worker.note("ended", codes=[process.exitcode for process in ended])
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def outside(worker: Worker) -> Any:
    """The caller of the function holds an iterator that every iteration goes on with."""
    stream = iter(loader("outside", persistent_workers=True))
    later: dict[str, Any] = {}

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        mine = later.setdefault("stream", None) or iter(loader("outside"))
        later["stream"] = mine
        pair = [next(stream), next(mine)]
        worker.note("loaded", iteration=call.iteration, items=[int(items[0]) for items in pair])
        if call.iteration < 3:
            dist.barrier()
            if worker.rank == 1:
                raise ValueError("boom")
            while True:
                next(mine if call.iteration % 2 else stream)
        worker.note("workers", alive=[p.is_alive() for p in multiprocessing.active_children()])
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def starting_workers(worker: Worker) -> Any:
    """Iterations end at any moment of the making of a loader's workers."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("entered", iteration=call.iteration)
        if call.iteration < worker.parameters["times"]:
            if worker.rank == 0:
                delay_s = 0.002 * call.iteration
                threading.Timer(delay_s, call.request_restart, ["at any moment"]).start()
            while True:
                for _ in loader("starting"):
                    pass
        worker.note("children", pids=[p.pid for p in multiprocessing.active_children()])
        worker.join()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


class Few(Dataset[int]):
    """Item i is i; each takes a moment."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(0.03)
        return index


def passes(worker: Worker) -> Any:
    """Rank 0 begins pass after pass over a loader that the caller holds; rank 1 raises."""
    kept = DataLoader(Few(), batch_size=None, num_workers=2, persistent_workers=True)

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("items", iteration=call.iteration, items=list(kept))
        if call.iteration < 4:
            dist.barrier()
            if worker.rank == 1:
                time.sleep(0.05)
                raise ValueError("boom")
            while True:
                next(iter(kept))
        return worker.finish(call)

    return worker.wrap(main, **FAST)()
