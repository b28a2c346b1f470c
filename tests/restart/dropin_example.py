"""A script as the guides have it, to be started by torchrun or to spawn its ranks by itself."""

import datetime
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ncclops import restart as inprocess

SPAWNED_RANKS = 2


@inprocess.Wrapper(
    initialize=inprocess.initialize.RetryController(max_iterations=3),
    health_check=inprocess.health_check.CudaHealthCheck(),
    soft_timeout=datetime.timedelta(seconds=60),
    hard_timeout=datetime.timedelta(seconds=90),
)
def train(call_wrapper: inprocess.CallWrapper) -> None:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if call_wrapper.iteration == 0 and dist.get_rank() == 0:
        raise RuntimeError("example fault")
    dist.barrier()
    # in one write: the ranks share the stream
    os.write(1, f"rank {dist.get_rank()} of {int(total)}: {call_wrapper.iteration}\n".encode())
    dist.destroy_process_group()


def spawned(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(SPAWNED_RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    train()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        mp.spawn(spawned, args=(int(sys.argv[1]),), nprocs=SPAWNED_RANKS)
