"""Two ranks that use NCCL, for ``gpu_day_page.py``: groups, collectives, a message, an abort."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.distributed_c10d import _abort_process_group

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.fakegpu.gpus import take_gpu


def main() -> None:
    """Both are forked from here: importing torch is what takes long."""
    with tempfile.TemporaryDirectory() as directory:
        meeting = f"file://{directory}/meeting"
        multiprocessing.start_processes(be_rank, (meeting,), nprocs=2, start_method="fork")


def be_rank(rank: int, meeting: str) -> None:
    """One of the two."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    device = take_gpu(rank)
    dist.init_process_group("nccl", meeting, rank=rank, world_size=2, device_id=device)
    numbers = torch.ones(4, device=device)
    dist.all_reduce(numbers)
    dist.broadcast(numbers, 0, group=dist.new_group([0, 1]))
    if rank == 0:
        dist.send(numbers, 1)
    else:
        dist.recv(numbers, 0)
    torch.cuda.synchronize()
    _abort_process_group()


if __name__ == "__main__":
    main()
