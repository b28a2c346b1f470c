"""DDP that keeps its objects after a fault.

    ncclops launch --nproc-per-node 2 docs/examples/keep_going_ddp.py

Model, optimizer, data and DDP stay where they are; with torch 2.14 and newer the process group
does, too, and is only given its new members. DDP is made anew where some rank is new, as it is in a
new process. What the interrupted step has left half done is put right from a snapshot in memory, to
the last bit.
``SNAPSHOT_FAULT=raise:1:5`` injects a fault once, on rank 1 at step 5; ``kill`` ends that rank with
SIGKILL, and a new process takes its place.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from snapshot_ddp import Shuffled, digest, inject_fault
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclops import receipt, restart
from ncclops.restart import snapshot


class Trainer:
    """All that outlives a fault, and the step it has come to."""

    def __init__(self, call: restart.CallWrapper, steps: int, number: int) -> None:
        self.call = call
        torch.manual_seed(0)
        self.steps, self.step = steps, 0
        self.model = nn.Sequential(
            nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 32)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.data = Shuffled(number)
        torch.manual_seed(number)  # dropout differs from rank to rank

    def regroup(self, old: restart.Membership | None, new: restart.Membership) -> None:
        """The group, what holds it, and the newest step that all have."""
        group = self.call.init_process_group("gloo")
        if not group.objects_stay:
            self.ddp = DistributedDataParallel(self.model)
        else:
            group.renew(self.ddp)
        self.snapshots = snapshot.Snapshots(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "data": self.data,
                "rng": snapshot.Rng(),
            },
            replicated=["model", "optimizer"],
        )
        restored = self.snapshots.restore()
        self.step = restored.step or 0
        begins = "begins" if old is None else "goes on"
        where = f"at step {self.step}, its group {group.rung.value}"
        print(f"rank {new.rank} of {new.world_size} {begins} {where}", flush=True)

    def train(self) -> None:
        while self.step < self.steps:
            inject_fault(self.step)
            batch = self.data.next_batch(torch.device("cpu"))
            self.optimizer.zero_grad()
            loss = (self.ddp(batch) - batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.snapshots.take(self.step + 1)
            receipt.step(self.step, loss=loss.item())
            self.step += 1


@restart.Wrapper(grow_timeout=timedelta(seconds=20))
def main(call: restart.CallWrapper, steps: int) -> None:
    trainer = Trainer(call, steps, restart.State.from_env().rank)
    call.keep_going(trainer.train, trainer.regroup)
    if dist.get_rank() == 0:
        print(f"result {digest(trainer.model.state_dict())}", flush=True)
    receipt.peak_memory()
    receipt.end()
    dist.barrier()
    del trainer.ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small model, and keep it.")
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
