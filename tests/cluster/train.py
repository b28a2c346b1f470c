"""A job whose result does not depend on how many ranks compute it, or how often it restarts.

    train.py DIRECTORY STEPS SECONDS_PER_STEP

Each step takes the mean gradient over 24 samples, which the ranks share out among themselves;
rank 0 writes a checkpoint after every step, and every start continues from the last one.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SAMPLES = 24


def gradient(weight: float, step: int, samples: range) -> float:
    return sum((weight - (step * 7 + sample) % 11) for sample in samples)


def main() -> None:
    directory, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    checkpoint = directory / "checkpoint"
    step, weight = 0, 0.0
    if checkpoint.exists():
        saved = checkpoint.read_text().split()
        step, weight = int(saved[0]), float(saved[1])
    # What is not the same on all ranks at the start would not be what one machine computes.
    start = torch.tensor([float(step), weight], dtype=torch.float64)
    dist.broadcast(start, 0)
    step, weight = int(start[0]), float(start[1])
    while step < steps:
        mine = range(rank, SAMPLES, world)
        total = torch.tensor([gradient(weight, step, mine)], dtype=torch.float64)
        dist.all_reduce(total)
        weight -= 0.1 * float(total[0]) / SAMPLES
        step += 1
        if rank == 0:
            partial = directory / f"partial-{os.getpid()}"
            partial.write_text(f"{step} {weight!r}\n")
            partial.replace(checkpoint)
            print(f"step {step} of {steps} on {world} ranks: {weight:.12f}", flush=True)
        time.sleep(pause)
    print(f"rank {rank} of {world}: done with {weight:.12f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
