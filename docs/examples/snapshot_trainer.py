"""A trainer of the shape that torchtitan has, with snapshots in the place of its fault tolerance.

    ncclops launch --nproc-per-node 2 docs/examples/snapshot_trainer.py

Model parts over a mesh of replicas and shards, containers of optimizers and schedulers with a state
of their own, a data loader with one, and the trainer's own counters: each has ``state_dict`` and
``load_state_dict``, as its checkpointer wants it, and that is all that snapshots need. Ranks with
the same shard hold the same parts, whichever replica they are in. ``SNAPSHOT_FAULT=raise:1:5``
injects a fault once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ncclops import receipt
from ncclops.restart import snapshot


class Optimizers:
    """One optimizer for each model part; the state is by name of parameter."""

    def __init__(self, parts: list[nn.Module], lr: float) -> None:
        self.parts = parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=lr) for part in parts]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        found: dict[str, Any] = {}
        for number, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            state = get_optimizer_state_dict(part, optimizer, options=options)
            found |= {f"{number}.{name}": value for name, value in state.items()}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for number, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            prefix = f"{number}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            set_optimizer_state_dict(part, optimizer, optim_state_dict=own, options=options)


class Dataloader:
    """Batches of this replica, and where it is in them."""

    def __init__(self, replica: int) -> None:
        self.replica, self.position = replica, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            seed = 1_000 * self.position + self.replica
            self.position += 1
            yield torch.rand(16, 32, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Trainer:
    """All that a training consists of; ``step`` and ``tokens`` are its own state."""

    def __init__(self, device: torch.device) -> None:
        world = dist.get_world_size()
        shards = 2 if world % 2 == 0 else 1
        self.mesh: DeviceMesh = init_device_mesh(
            device.type, (world // shards, shards), mesh_dim_names=("replicate", "shard")
        )
        self.device = device
        torch.manual_seed(0)
        self.model_parts = [
            nn.Sequential(nn.Linear(32, 64), nn.ReLU()).to(device),
            nn.Sequential(nn.Linear(64, 32)).to(device),
        ]
        for part in self.model_parts:
            fully_shard(part, mesh=self.mesh)
        self.optimizers = Optimizers(self.model_parts, lr=1e-2)
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(1.0, (step + 1) / 10))
            for each in self.optimizers.optimizers
        ]
        self.dataloader = Dataloader(dist.get_rank())
        self.step = self.tokens = 0
        parts = {f"model{i}": part for i, part in enumerate(self.model_parts)}
        schedules = {f"schedule{i}": each for i, each in enumerate(self.schedulers)}
        equal = {**parts, **schedules, "optimizers": self.optimizers}
        self.snapshots = snapshot.Snapshots(
            {**equal, "dataloader": self.dataloader, "trainer": self, "rng": snapshot.Rng()},
            replicated=equal.keys(),
            shard=str(self.mesh.get_local_rank("shard")),
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.tokens = state["step"], state["tokens"]

    def train_step(self, batch: torch.Tensor) -> None:
        self.optimizers.zero_grad()
        hidden = batch.to(self.device)
        for part in self.model_parts:
            hidden = part(hidden)
        (hidden - batch.to(self.device)).square().mean().backward()
        self.optimizers.step()
        for each in self.schedulers:
            each.step()
        self.tokens += batch.numel()

    def train(self, steps: int) -> None:
        restored = self.snapshots.restore()
        print(f"rank {dist.get_rank()} restored: {restored}", flush=True)
        batches = iter(self.dataloader)
        while self.step < steps:
            inject_fault(self.step)
            self.train_step(next(batches))
            receipt.step(self.step)
            self.step += 1  # before the snapshot, which holds it
            self.snapshots.take(self.step)

    def digest(self) -> str:
        whole = hashlib.sha256(f"{self.tokens}".encode())
        for part in self.model_parts:
            for name, tensor in part.state_dict().items():
                whole.update(name.encode() + tensor.full_tensor().cpu().numpy().tobytes())
        return whole.hexdigest()[:16]


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model in a trainer's shape.")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    trainer = Trainer(device)
    trainer.train(arguments.steps)
    result = trainer.digest()
    if dist.get_rank() == 0:
        print(f"snapshots took {trainer.snapshots.overhead.share:.1%} of the time")
        print(f"result {result}", flush=True)
    receipt.peak_memory()
    receipt.end()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
