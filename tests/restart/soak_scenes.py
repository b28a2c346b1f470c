"""What the ranks of a soak do: trainings whose batches come from all that trainings are made of.

Each scene hands ``float(step % 7)`` of the steps from ``start`` on to ``do``, in its own way; so
the result depends neither on the scene nor on the number of ranks nor, therefore, on the faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import multiprocessing
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ncclops import restart as inprocess
from ncclops.restart._groups.ending import wait_for_groups_to_end
from ncclops.testing import note, place
from tests.fakegpu.gpus import take_gpu

Do = Callable[[float], None]
_PERIOD = 7


def undisturbed(steps: int) -> float:
    """The result, whatever strikes."""
    return float(sum(step % _PERIOD for step in range(steps)))


class Steps(Dataset[float]):
    """The batches from ``start`` on."""

    def __init__(self, start: int, steps: int) -> None:
        self._start = start
        self._steps = steps

    def __len__(self) -> int:
        return self._steps - self._start

    def __getitem__(self, index: int) -> float:
        return float((self._start + index) % _PERIOD)


def loader(start: int, steps: int, do: Do) -> None:
    """Worker processes that live for one pass over the data."""
    if start < steps:
        for batch in DataLoader(Steps(start, steps), num_workers=2, batch_size=None):
            do(float(batch))


def persistent_loader(start: int, steps: int, do: Do) -> None:
    """Worker processes that live on between two passes; the second one is cut short."""
    while start < steps:
        half = (start + steps + 1) // 2
        batches = DataLoader(
            Steps(start, half), num_workers=2, batch_size=None, persistent_workers=True
        )
        for batch in batches:
            do(float(batch))
        for _ in batches:
            break
        start = half


def generators(start: int, steps: int, do: Do) -> None:
    """Generators within each other, each with something to clean up."""

    def outer() -> Generator[float, None, None]:
        try:
            yield from inner()
        finally:
            time.sleep(0.002)

    def inner() -> Generator[float, None, None]:
        for step in range(start, steps):
            try:
                yield float(step % _PERIOD)
            finally:
                time.sleep(0.001)

    with contextlib.closing(outer()) as batches:
        for batch in batches:
            do(batch)


def tasks(start: int, steps: int, do: Do) -> None:
    """A producer and a consumer of asyncio, in one group."""

    async def produce(batches: asyncio.Queue[float | None]) -> None:
        for step in range(start, steps):
            await batches.put(float(step % _PERIOD))
        await batches.put(None)

    async def consume(batches: asyncio.Queue[float | None]) -> None:
        while (batch := await batches.get()) is not None:
            do(batch)
            await asyncio.sleep(0)

    async def main() -> None:
        batches: asyncio.Queue[float | None] = asyncio.Queue(2)
        async with asyncio.TaskGroup() as group:
            group.create_task(produce(batches))
            group.create_task(consume(batches))

    asyncio.run(main())


def thread_pool(start: int, steps: int, do: Do) -> None:
    """Threads that work ahead, in a pool that is closed on the way out."""

    def work(step: int) -> float:
        time.sleep(0.001)
        return float(step % _PERIOD)

    with ThreadPoolExecutor(3) as pool:
        for batch in pool.map(work, range(start, steps)):
            do(batch)


def children(start: int, steps: int, do: Do) -> None:
    """A forked child for each batch, by hand and by multiprocessing in turn."""
    context = multiprocessing.get_context("fork")
    for step in range(start, steps):
        if step % 2:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(theirs, step), daemon=True)
            process.start()
            theirs.close()
            try:
                batch = ours.recv()
                process.join()
            finally:
                ours.close()
                process.kill()
                process.join()
                process.close()
        else:
            child = os.fork()
            if child == 0:
                os._exit(step % _PERIOD)
            try:
                batch = float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            except BaseException:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
                raise
        do(batch)


def _send(end: Any, step: int) -> None:
    end.send(float(step % _PERIOD))


def plain(start: int, steps: int, do: Do) -> None:
    """A loop."""
    for step in range(start, steps):
        do(float(step % _PERIOD))


SCENES = {
    "plain": plain,
    "loader": loader,
    "persistent-loader": persistent_loader,
    "generators": generators,
    "asyncio": tasks,
    "thread-pool": thread_pool,
    "children": children,
    "writer": plain,  # checkpoints are written by a thread
    "nested": plain,  # the wrapped function is called by another one
    "ddp": plain,  # the reduction is that of a model's backward pass
}


def mean(batch: float) -> float:
    """Over the ranks, by a collective of our own."""
    total = torch.tensor([batch])
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


class Model:
    """The same by the gradient of a model."""

    def __init__(self) -> None:
        self._model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))

    def mean(self, batch: float) -> float:
        """Over the ranks."""
        self._model.zero_grad()
        self._model(torch.tensor([batch])).backward()
        gradient = self._model.module.weight.grad
        assert isinstance(gradient, torch.Tensor)
        return float(gradient)


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
        draft = self._path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        draft.write_text(json.dumps([step, weight]))
        draft.replace(self._path)


class Writer:
    """A thread that writes checkpoints one after the other, and ends with its iteration."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._waiting: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def save(self, step: int, weight: float) -> None:
        """Soon."""
        self._waiting.put((step, weight))

    def close(self) -> None:
        """When all is written."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (state := self._waiting.get()) is not None:
            self._checkpoint.save(*state)


def train(scene: str, directory: Path, steps: int, timing: dict[str, Any]) -> float | None:
    """The training of ``scene``, wrapped; ``timing`` are the wrapper's timeouts."""
    if scene == "ddp":
        # The first model imports it, and the group that there is at that moment is never freed.
        importlib.import_module("torch._dynamo")
    limit = inprocess.initialize.RetryController(max_iterations=5000)
    wrapped = inprocess.Wrapper(initialize=limit, **timing)(_train)
    if scene != "nested":
        return wrapped(scene, directory, steps)
    # The outer one looks on: what happens inside is for the inner one to mend, if it can.
    patient = {name: 3 * timing[name] for name in timing if name.endswith("_timeout")}
    outer = inprocess.Wrapper(initialize=limit, **{**timing, **patient})(_call)
    return outer(wrapped, scene, directory, steps)


def _call(wrapped: Callable[..., float | None], *arguments: Any) -> float | None:
    return wrapped(*arguments)


def _train(
    scene: str, directory: Path, steps: int, *, call: inprocess.CallWrapper | None = None
) -> float:
    assert call is not None
    note("holds", iteration=call.iteration, **holdings())
    dist.init_process_group("gloo")
    checkpoint = Checkpoint(directory / "checkpoint.json")
    start, weight = checkpoint.load()
    number = start
    with contextlib.ExitStack() as stack:
        save = checkpoint.save
        if scene == "writer":
            writer = Writer(checkpoint)
            stack.callback(writer.close)
            save = writer.save
        reduce = Model().mean if scene == "ddp" else mean

        def do(batch: float) -> None:
            nonlocal number, weight
            place("step")
            gradient = reduce(batch)
            place("reduced")
            weight += gradient
            number += 1
            if dist.get_rank() == 0:
                with call.atomic():
                    place("saving")
                    save(number, weight)

        SCENES[scene](start, steps, do)
    dist.barrier()
    dist.destroy_process_group()
    return weight


def holdings() -> dict[str, int]:
    """What this process holds of that which leaks; memory in KiB, without what is shared."""
    wait_for_groups_to_end(60)
    maps = Path("/proc/self/maps").read_text().splitlines()
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "segments": sum("/dev/shm/" in line or "/memfd:" in line for line in maps),
        "memory": (resident - shared) * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def restart_often(
    times: int, timing: dict[str, Any], backend: str = "gloo", keeps_going: bool = False
) -> int:
    """Restart ``times`` times, the fault on another rank each time; holdings now and then.

    ``keeps_going``: the function is not called again, and the default group may stay.
    """
    limit = inprocess.initialize.RetryController(max_iterations=times + 1)
    scene = _go_on_often if keeps_going else _raise_often
    value = inprocess.Wrapper(initialize=limit, **timing)(scene)(times, backend)
    assert value is not None
    return value


def _go_on_often(times: int, backend: str, *, call: inprocess.CallWrapper | None = None) -> int:
    assert call is not None
    going = call
    rungs: Counter[str] = Counter()

    def regroup(_old: inprocess.Membership | None, new: inprocess.Membership) -> None:
        rungs[going.init_process_group(backend).rung.value] += 1
        dist.barrier()
        if new.iteration % max(1, times // 20) == 0:
            note("holds", iteration=new.iteration, **holdings())

    def loop() -> int:
        number = going.iteration
        dist.all_reduce(torch.ones(1))
        if number < times and number % dist.get_world_size() == dist.get_rank():
            raise ValueError(f"number {number}")
        dist.barrier()
        return number

    number = going.keep_going(loop, regroup)
    note("rungs", **rungs)
    dist.destroy_process_group()
    return number


def _raise_often(times: int, backend: str, *, call: inprocess.CallWrapper | None = None) -> int:
    assert call is not None
    if call.iteration % max(1, times // 20) == 0:
        note("holds", iteration=call.iteration, **holdings())
    device = take_gpu(int(os.environ["RANK"])) if backend == "nccl" else None
    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(1, device=device))
    if call.iteration < times and call.iteration % dist.get_world_size() == dist.get_rank():
        raise ValueError(f"number {call.iteration}")
    dist.barrier()
    dist.destroy_process_group()
    return call.iteration
