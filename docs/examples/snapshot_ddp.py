"""DDP that goes on from snapshots: a fault costs a step, and with two ranks changes no bit.

    ncclops launch --nproc-per-node 2 docs/examples/snapshot_ddp.py

Model, optimizer and schedule are equal on all ranks, so each has them from its own memory after a
fault, or from any other rank. The generators of random numbers and the place in the data are a
rank's own: a partner keeps a copy. ``SNAPSHOT_FAULT=raise:1:5`` injects a fault once, on rank 1 at
step 5; ``kill`` ends that rank with SIGKILL.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclops import receipt
from ncclops.restart import snapshot


class Shuffled:
    """A rank's share of the data, in an order of its own, without an end."""

    def __init__(self, rank: int) -> None:
        self.generator = random.Random(rank)
        self.seen = 0

    def next_batch(self, device: torch.device) -> torch.Tensor:
        self.seen += 1
        numbers = [self.generator.random() for _ in range(16 * 32)]
        return torch.tensor(numbers, device=device).view(16, 32)

    def state_dict(self) -> dict[str, object]:
        return {"generator": self.generator.getstate(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.generator.setstate(state["generator"])  # type: ignore[arg-type]
        self.seen = int(str(state["seen"]))


def inject_fault(step: int) -> None:
    """The fault that SNAPSHOT_FAULT asks for, once in a run."""
    kind, rank, at = os.environ.get("SNAPSHOT_FAULT", "none:0:0").split(":")
    marker = Path(os.environ.get("NCCLOPS_RUN_DIR") or tempfile.gettempdir()) / "snapshot-fault"
    if kind == "none" or (dist.get_rank(), step) != (int(rank), int(at)) or marker.exists():
        return
    marker.touch()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"injected on rank {rank} at step {step}")


def digest(state: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        whole.update(name.encode() + tensor.cpu().numpy().tobytes())
    return whole.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with DDP and snapshots.")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    layers = (nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 32))
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    data = Shuffled(dist.get_rank())
    torch.manual_seed(dist.get_rank())  # dropout differs from rank to rank

    snapshots = snapshot.Snapshots(
        {
            "model": model.module,
            "optimizer": optimizer,
            "schedule": schedule,
            "data": data,
            "rng": snapshot.Rng(),
        },
        replicated=["model", "optimizer", "schedule"],
    )
    restored = snapshots.restore()
    print(f"rank {dist.get_rank()} restored: {restored}", flush=True)
    for step in range(restored.step or 0, arguments.steps):
        inject_fault(step)
        batch = data.next_batch(device)
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        snapshots.take(step + 1)
        receipt.step(step, loss=loss.item())

    if dist.get_rank() == 0:
        print(f"snapshots took {snapshots.overhead.share:.1%} of the time")
        print(f"result {digest(model.module.state_dict())}", flush=True)
    receipt.peak_memory()
    receipt.end()
    dist.barrier()
    del model
    gc.collect()  # DDP keeps the process group in reference cycles
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
