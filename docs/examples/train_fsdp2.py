"""FSDP2 over a two-dimensional mesh, with receipts: its groups' timeouts tighten after warm-up.

    ncclops launch --nproc-per-node 4 --profile compile-sensitive docs/examples/train_fsdp2.py

Prints the loss of each step, and the timeout of each process group while the first step may
compile, after it, and for a group that is made later. Runs with torchrun as well, where nothing
changes the timeouts.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard

from ncclops import receipt


def show_timeouts(when: str) -> None:
    """One line a group, from rank 0."""
    if dist.get_rank() != 0:
        return
    for group in _world.pg_map:
        device = next(iter(group._device_types))
        seconds = group._get_backend(device).options._timeout.total_seconds()
        print(f"{when}: {group.group_desc} {seconds:g} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with FSDP2.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--fail-once-at", type=int, metavar="STEP", help="and start again")
    arguments = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world_size = dist.get_world_size()
    shards = 2 if world_size % 2 == 0 else 1
    shape, names = (world_size // shards, shards), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(32, 64, generator=generator).to(device)
        loss: torch.Tensor = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    show_timeouts("compiling")
    with receipt.compile_warmup():
        train_step(0)
    show_timeouts("warm")
    dist.new_group(list(range(world_size)), group_desc="made later")
    show_timeouts("later")
    for step in range(arguments.steps):
        if step == arguments.fail_once_at and dist.get_rank() == 0 and first_time():
            raise RuntimeError("failing once, as asked")
        loss = train_step(step)
        receipt.step(step, loss=loss.item())
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    receipt.peak_memory()
    receipt.end()
    dist.destroy_process_group()


def first_time() -> bool:
    """Whether this process has not failed yet: the environment of the run outlives no restart."""
    seen = getattr(torch, "_example_has_failed", False)
    torch._example_has_failed = True  # modules stay imported
    return not seen


if __name__ == "__main__":
    main()
