"""A job that uses NCCL, for ``gpu_day_page.py``: two groups, collectives, a message, an abort."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.fakegpu.gpus import take_gpu

rank = int(os.environ["RANK"])
device = take_gpu(rank)
dist.init_process_group("nccl", device_id=device)
numbers = torch.ones(4, device=device)
dist.all_reduce(numbers)
dist.broadcast(numbers, 0, group=dist.new_group([0, 1]))
if rank == 0:
    dist.send(numbers, 1)
else:
    dist.recv(numbers, 0)
torch.cuda.synchronize()
_abort_process_group()
