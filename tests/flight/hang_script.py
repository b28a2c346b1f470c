"""Scripted hangs: what each rank of a job does. The line a verdict has to name ends in `# HERE`.

Each function gets the rank, the world size and `about_to`, to be called right before the rank gets
stuck (or is done). Warm-up steps have been made: all_reduce of 4, broadcast of 16, barrier.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

FOREVER_S = 600
Ready = Callable[[], None]
device = "cpu"  # of the tensors; NCCL's ranks have a GPU each


def odd_rank(world: int) -> int:
    return world - 2


def ones(size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, device=device)


def step(about_to: Ready | None = None) -> None:
    if about_to is not None:
        about_to()
    dist.all_reduce(ones(4))  # STEP
    dist.broadcast(ones(16), 0)
    dist.barrier()


def sleeping(rank: int, world: int, about_to: Ready) -> None:
    if rank == odd_rank(world):
        about_to()
        time.sleep(FOREVER_S)  # HERE
    step(about_to)


def two_sleeping(rank: int, world: int, about_to: Ready) -> None:
    if rank in (1, odd_rank(world)):
        about_to()
        time.sleep(FOREVER_S)  # HERE
    step(about_to)


def other_shape(rank: int, world: int, about_to: Ready) -> None:
    size = 3 if rank == odd_rank(world) else 4
    about_to()
    dist.all_reduce(ones(size))  # HERE


def other_dtype(rank: int, world: int, about_to: Ready) -> None:
    dtype = torch.float16 if rank == odd_rank(world) else torch.float32
    about_to()
    dist.all_reduce(ones(4, dtype=dtype))  # HERE


def larger_dtype(rank: int, world: int, about_to: Ready) -> None:
    dtype = torch.float64 if rank == odd_rank(world) else torch.float32
    about_to()
    dist.all_reduce(ones(4, dtype=dtype))  # HERE


def other_op(rank: int, world: int, about_to: Ready) -> None:
    about_to()
    if rank == odd_rank(world):
        dist.reduce(ones(4), rank)  # HERE
        time.sleep(FOREVER_S)
    else:
        dist.all_reduce(ones(4))


def other_order(rank: int, world: int, about_to: Ready) -> None:
    about_to()
    if rank == odd_rank(world):
        dist.broadcast(ones(16), 0)  # HERE
        dist.all_reduce(ones(4))
    else:
        dist.all_reduce(ones(4))
        dist.broadcast(ones(16), 0)


def two_groups(rank: int, world: int, about_to: Ready) -> None:
    one = dist.new_group(group_desc="dp")
    other = dist.new_group(group_desc="tp")
    about_to()
    if rank == odd_rank(world):
        dist.all_reduce(ones(2), group=other)  # HERE
        dist.all_reduce(ones(2), group=one)
    else:
        dist.all_reduce(ones(2), group=one)
        dist.all_reduce(ones(2), group=other)


def circle_of_pairs(rank: int, world: int, about_to: Ready) -> None:
    """Each pair (r, r+1) is a group; every rank begins with the one it shares with the next."""
    pairs = [dist.new_group(sorted((r, (r + 1) % world)), group_desc=f"p{r}") for r in range(world)]
    about_to()
    dist.all_reduce(ones(2), group=pairs[rank])  # HERE
    dist.all_reduce(ones(2), group=pairs[rank - 1])


def two_groups_again(rank: int, world: int, about_to: Ready) -> None:
    """The communicators are there already: no call waits, the device does."""
    one = dist.new_group(group_desc="dp")
    other = dist.new_group(group_desc="tp")
    for group in (one, other):
        dist.all_reduce(ones(2), group=group)
    about_to()
    if rank == odd_rank(world):
        dist.all_reduce(ones(2), group=other)  # HERE
        dist.all_reduce(ones(2), group=one)
    else:
        dist.all_reduce(ones(2), group=one)
        dist.all_reduce(ones(2), group=other)


def circle_of_pairs_again(rank: int, world: int, about_to: Ready) -> None:
    pairs = [dist.new_group(sorted((r, (r + 1) % world)), group_desc=f"p{r}") for r in range(world)]
    own, others = pairs[rank], pairs[rank - 1]
    for group in (own, others) if rank % 2 else (others, own):
        dist.all_reduce(ones(2), group=group)
    about_to()
    dist.all_reduce(ones(2), group=own)  # HERE
    dist.all_reduce(ones(2), group=others)


def other_device(rank: int, world: int, about_to: Ready) -> None:
    """One rank has its gradient on the CPU: the same call, and another backend of the group."""
    about_to()
    if rank == odd_rank(world):
        dist.all_reduce(torch.ones(4))  # HERE
    else:
        dist.all_reduce(ones(4))


def sleeping_on_cpu(rank: int, world: int, about_to: Ready) -> None:
    """The others wait in the group's Gloo."""
    dist.all_reduce(ones(4))
    about_to()
    if rank == odd_rank(world):
        time.sleep(FOREVER_S)  # HERE
    dist.all_reduce(torch.ones(4))


def killed_inside(rank: int, world: int, about_to: Ready) -> None:
    if rank == odd_rank(world):
        work = dist.all_reduce(ones(4), async_op=True)
        about_to()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
    if rank == 0:  # so that the others are inside when it dies
        about_to()
        time.sleep(0.6)
    else:
        about_to()
    dist.all_reduce(ones(4))


def holding_the_gil(rank: int, world: int, about_to: Ready) -> None:
    if rank == odd_rank(world):
        about_to()
        ctypes.PyDLL(None).sleep(FOREVER_S)  # HERE
    step(about_to)


class _Slow(Dataset[torch.Tensor]):
    def __init__(self, is_slow: bool) -> None:
        self._is_slow = is_slow

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._is_slow and index >= 4:
            time.sleep(FOREVER_S)  # HERE data_loader
        return torch.ones(4)


def data_loader(rank: int, world: int, about_to: Ready) -> None:
    for number, batch in enumerate(DataLoader(_Slow(rank == odd_rank(world)), batch_size=2)):
        if number == 1:
            about_to()
        dist.all_reduce(batch.to(device))


def data_loader_workers(rank: int, world: int, about_to: Ready) -> None:
    workers = 1 if rank == odd_rank(world) else 0
    loader = DataLoader(_Slow(workers > 0), batch_size=2, num_workers=workers)
    for number, batch in enumerate(loader):  # HERE
        if number == 1:
            about_to()
        dist.all_reduce(batch.to(device))


def missing_barrier(rank: int, world: int, about_to: Ready) -> None:
    about_to()
    if rank == odd_rank(world):
        time.sleep(FOREVER_S)  # HERE
    dist.barrier()


def larger_shape(rank: int, world: int, about_to: Ready) -> None:
    size = 9 if rank == odd_rank(world) else 4
    about_to()
    dist.all_reduce(ones(size))  # HERE


def monitored(rank: int, world: int, about_to: Ready) -> None:
    about_to()
    if rank == odd_rank(world):
        time.sleep(FOREVER_S)  # HERE
    dist.monitored_barrier()


def gather_shape(rank: int, world: int, about_to: Ready) -> None:
    size = 3 if rank == odd_rank(world) else 4
    about_to()
    dist.all_gather([ones(size) for _ in range(world)], ones(size))  # HERE


def one_step_more(rank: int, world: int, about_to: Ready) -> None:
    steps = 3 if rank == odd_rank(world) else 2
    for number in range(steps):
        if number == 1:
            about_to()
        dist.all_reduce(ones(4))  # HERE
    dist.barrier()


def one_step_less(rank: int, world: int, about_to: Ready) -> None:
    dist.all_reduce(ones(4))
    about_to()
    if rank != odd_rank(world):
        dist.all_reduce(ones(4))
    else:
        time.sleep(FOREVER_S)  # HERE


def raised_and_cleans_up(rank: int, world: int, about_to: Ready) -> None:
    try:
        if rank == odd_rank(world):
            raise ValueError("bad batch")
        step(about_to)
    finally:
        about_to()
        time.sleep(FOREVER_S)  # HERE


def subgroup_shape(rank: int, world: int, about_to: Ready) -> None:
    half = world // 2
    low = dist.new_group(list(range(half)), group_desc="low")
    high = dist.new_group(list(range(half, world)), group_desc="high")
    size = 3 if rank == odd_rank(world) else 4
    if rank < half:
        dist.all_reduce(ones(4), group=low)
    else:
        about_to()
        dist.all_reduce(ones(size), group=high)  # HERE
    about_to()
    dist.barrier()


def chain(rank: int, world: int, about_to: Ready) -> None:
    """Rank 0 sleeps; 1 waits for it in one group, and the rest for 1 in another."""
    first = dist.new_group([0, 1], group_desc="first")
    rest = dist.new_group(list(range(1, world)), group_desc="rest")
    about_to()
    if rank == 0:
        time.sleep(FOREVER_S)  # HERE
    if rank == 1:
        dist.all_reduce(ones(2), group=first)
    dist.all_reduce(ones(2), group=rest)


def receives_nothing(rank: int, world: int, about_to: Ready) -> None:
    about_to()
    if rank == odd_rank(world):
        dist.recv(ones(2), 0)  # HERE
    dist.all_reduce(ones(4))


def asynchronous(rank: int, world: int, about_to: Ready) -> None:
    if rank == odd_rank(world):
        about_to()
        time.sleep(FOREVER_S)  # HERE
    work = dist.all_reduce(ones(4), async_op=True)
    about_to()
    work.wait()


def merely_late(rank: int, world: int, about_to: Ready) -> None:
    if rank == odd_rank(world):
        time.sleep(0.5)
    step()
    about_to()
    time.sleep(FOREVER_S)


def healthy(rank: int, world: int, about_to: Ready) -> None:
    for _ in range(3):
        step()
    about_to()
    time.sleep(FOREVER_S)
