#!/usr/bin/env python3
"""What measuring how long ranks wait (``ncclops.worker.waits``) costs the thread that trains.

    python scripts/bench_waits.py [--blocks 30] [--pause-ms 2]
    scripts/fake_gpu python scripts/bench_waits.py --backend nccl

Two ranks, each step with four ``all_reduce`` and a backward pass under DistributedDataParallel, in
blocks of 20 steps in turns: without, as in a job, where the budget decides, and with every step
measured.
Counted is the CPU time of the main thread in each step, so that neither waiting nor what else runs
on the machine is in it. On the fake GPU, calls into CUDA cost what they cost there.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 20
COLLECTIVES = 4


def run_rank(backend: str, blocks: int, pause_s: float) -> None:
    """One rank: prints the microseconds of a step, by way."""
    import torch
    import torch.distributed as dist

    from ncclops.receipts.recorder import Recorder
    from ncclops.worker import waits

    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend)

    def recorder(name: str) -> Recorder:
        directory = Path(os.environ["BENCH_DIR"], name)
        path = directory / "ranks" / str(rank)
        path.mkdir(parents=True, exist_ok=True)
        return Recorder(directory, rank, os.open(path / "receipt.jsonl", os.O_WRONLY | os.O_CREAT))

    def model() -> Any:
        layer = torch.nn.Linear(16, 16).to(device)
        return torch.nn.parallel.DistributedDataParallel(layer)

    def patched() -> dict[tuple[Any, str], Any]:
        methods = {
            (dist.ProcessGroup, name): each for name, each in vars(dist.ProcessGroup).items()
        }
        return methods | {(dist.Work, "wait"): vars(dist.Work)["wait"]}

    originals, plain, plain_recorder = patched(), model(), recorder("plain")
    watched_recorder = recorder("watched")
    waits.Waits(watched_recorder).follow()
    measured = {key: value for key, value in patched().items() if originals[key] is not value}
    watched = model()
    budget = waits.BUDGET
    waits._ADVANCE_NS = 0  # of a long run, the beginning does not count
    used = {
        "without": (plain, plain_recorder, originals, 0.0),
        "as in a job": (watched, watched_recorder, measured, budget),
        "every step": (watched, watched_recorder, measured, 1.0),
    }
    tensor, example = torch.ones(1000, device=device), torch.ones(8, 16, device=device)
    number = 0
    # What every step costs counts against the budget, so this comes after it.
    for turns in (("without", "as in a job"), ("without", "every step")):
        costs: dict[str, list[float]] = {way: [] for way in turns}
        for way in turns * blocks:
            ddp, receipts, methods, allowed = used[way]
            for on, name in measured:
                setattr(on, name, methods[on, name])
            waits.BUDGET = allowed
            for _ in range(STEPS):
                time.sleep(pause_s)
                began = time.thread_time_ns()
                for _ in range(COLLECTIVES):
                    dist.all_reduce(tensor)
                ddp(example).sum().backward()
                receipts.step(number, None, None, None)
                costs[way].append((time.thread_time_ns() - began) / 1000)
                number += 1
        if rank == 0:
            without, more = (trimmed_mean(values) for values in costs.values())
            print(
                f"{backend}  {turns[1]:12} {more:8.1f} us a step, without {without:8.1f} us,"
                f" {(more - without) / 1000:+.3f} % of 100 ms"
            )
    dist.barrier()
    dist.destroy_process_group()


def trimmed_mean(values: list[float]) -> float:
    """Without the longest twentieth: interrupts of the machine count as CPU time too."""
    return statistics.fmean(sorted(values)[: len(values) * 19 // 20])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of measuring waits.")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--pause-ms", type=float, default=2.0, help="between two steps")
    arguments = parser.parse_args()
    if "BENCH_DIR" in os.environ:
        run_rank(arguments.backend, arguments.blocks, arguments.pause_ms / 1000)
        return
    with socket.socket() as free, tempfile.TemporaryDirectory() as directory:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        shared = {
            "BENCH_DIR": directory,
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if arguments.backend == "nccl":
            shared |= {"FAKEGPU_MEETING": directory}
        ranks = [
            subprocess.Popen(
                [sys.executable, *sys.argv], env=os.environ | shared | {"RANK": str(rank)}
            )
            for rank in range(2)
        ]
        sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
