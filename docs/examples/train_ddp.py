"""A small transformer learns modular arithmetic with DDP: a real workload in under a minute.

Each sequence walks through the numbers below ``VOCABULARY`` with a step size of its own; the
model must read the step size off the first numbers to predict the rest. Runs unchanged under

    ncclops launch --nproc-per-node 2 docs/examples/train_ddp.py
    torchrun --nproc-per-node 2 docs/examples/train_ddp.py
    python docs/examples/train_ddp.py

with NCCL where every rank has a GPU and Gloo otherwise. It can be stopped and started at any
point: every start goes on from the last checkpoint. The global batch does not depend on the
number of ranks, so neither does the loss, beyond rounding.

To see what a fault does, inject one, once in a run: ``TRAIN_DDP_FAULT=raise:1:5`` raises on rank 1
at step 5; ``kill`` ends the rank with SIGKILL, ``hang`` has it sleep for good.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 31
CONTEXT = 16


class Transformer(nn.Module):
    """Token ids of shape (batch, time) in, logits of shape (batch, time, VOCABULARY) out."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        time_steps = ids.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(time_steps, device=ids.device)
        hidden = self.tokens(ids) + self.positions[:time_steps]
        logits: Tensor = self.head(self.blocks(hidden, mask=causal, is_causal=True))
        return logits


def batch_of(step: int, size: int, rank: int, world_size: int, device: torch.device) -> Tensor:
    """This rank's share of the global batch of ``step``; the same whatever the world size."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (size, 1), generator=generator)
    stride = torch.randint(1, VOCABULARY, (size, 1), generator=generator)
    walk = (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    return walk[rank::world_size].to(device)


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, partial)
    partial.replace(path)


def load(path: Path, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the checkpoint; the step to go on with. One of a finished run is left alone."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["step"] >= steps:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def default_checkpoint() -> Path:
    """In the run's own directory under ncclops, so that two runs never share one."""
    return Path(os.environ.get("NCCLOPS_RUN_DIR", ".")) / "checkpoints" / "train_ddp.pt"


def inject_fault(step: int, rank: int, marker: Path) -> None:
    """The fault that TRAIN_DDP_FAULT asks for, unless ``marker`` says that it has been."""
    kind, victim, at = os.environ.get("TRAIN_DDP_FAULT", "none:0:0").split(":")
    if kind == "none" or (rank, step) != (int(victim), int(at)) or marker.exists():
        return
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    if kind == "raise":
        raise RuntimeError(f"injected on rank {rank} at step {step}")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(24 * 3600)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small transformer with DDP.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=96, help="global batch, over all ranks")
    parser.add_argument("--checkpoint", type=Path, default=default_checkpoint())
    parser.add_argument("--checkpoint-every", type=int, default=25, metavar="STEPS")
    return parser.parse_args()


def train(arguments: argparse.Namespace, device: torch.device) -> float:
    """Train to the end; the global loss of the last step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer().to(device))
    # The usual eps of 1e-8 would turn rounding in gradients that are next to nothing into steps of
    # full size, and another number of ranks into another loss.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    first = load(arguments.checkpoint, arguments.steps, model.module, optimizer)
    dist.barrier()  # nobody overwrites the checkpoint before everybody has read it
    if first and rank == 0:
        print(f"resumed from {arguments.checkpoint} at step {first}")
    loss_value = float("nan")
    for step in range(first, arguments.steps):
        inject_fault(step, rank, arguments.checkpoint.with_suffix(".fault"))
        began = time.perf_counter()
        walk = batch_of(step, arguments.batch, rank, world_size, device)
        logits = model(walk[:, :-1])
        summed = cross_entropy(logits.flatten(0, 1), walk[:, 1:].flatten(), reduction="sum")
        # DDP averages gradients over ranks; scaled like this, that is the global mean even
        # where the batch does not divide evenly.
        loss = summed * world_size / (arguments.batch * CONTEXT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        loss_value = mean.item()
        if step == first and rank == 0:
            print(f"compile_warmup {time.perf_counter() - began:.2f}s (the first step)")
        if rank == 0 and (step < 4 or (step + 1) % 25 == 0):
            rate = arguments.batch * CONTEXT / (time.perf_counter() - began)
            print(f"step {step:05d} loss {loss_value:.4f} tok/s {rate:,.0f}")
        if rank == 0 and (step + 1) % arguments.checkpoint_every == 0:
            save(arguments.checkpoint, step + 1, model.module, optimizer)
    return loss_value


def peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux gives KiB


def main() -> None:
    arguments = parse_arguments()
    for name, alone in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }.items():
        os.environ.setdefault(name, alone)  # plain `python` says nothing
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    else:
        store = dist.HashStore()
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    try:
        loss = train(arguments, device)
    finally:
        # DDP is full of reference cycles and keeps the process group, whose threads would
        # otherwise be alive while the interpreter shuts down, and now and then abort it.
        gc.collect()
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(f"peak memory {peak_memory_gib(device):.2f} GiB")
        print(f"training finished: final loss {loss:.4f}")


if __name__ == "__main__":
    main()
