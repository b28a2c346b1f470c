"""FSDP2 that goes on from snapshots: each rank keeps its shards, and its partner a copy.

    ncclops launch --nproc-per-node 2 docs/examples/snapshot_fsdp2.py

No other rank has a rank's shards, so nothing is ``replicated``. The checkpoint, written now and
then, is the last resort: for when a rank and its partner are lost at once, and for another number
of ranks, whose shards are of another size. ``SNAPSHOT_FAULT=raise:1:5`` injects a fault
once, on rank 1 at step 5; ``kill`` ends that rank with SIGKILL.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ncclops import receipt
from ncclops.restart import snapshot

RUN = Path(os.environ.get("NCCLOPS_RUN_DIR") or tempfile.gettempdir())


def inject_fault(step: int) -> None:
    """The fault that SNAPSHOT_FAULT asks for, once in a run."""
    kind, rank, at = os.environ.get("SNAPSHOT_FAULT", "none:0:0").split(":")
    marker = RUN / "snapshot-fault"
    if kind == "none" or (dist.get_rank(), step) != (int(rank), int(at)) or marker.exists():
        return
    marker.touch()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"injected on rank {rank} at step {step}")


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Collective: all ranks write their shards below ``path``, then its name into ``newest``."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path / str(step))
    if dist.get_rank() == 0:
        draft = path / "newest.draft"
        draft.write_text(str(step))
        draft.replace(path / "newest")


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
    """Collective: the step of the newest checkpoint below ``path``, which is loaded."""
    if not (path / "newest").exists():
        return None
    step = int((path / "newest").read_text())
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path / str(step))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return step


def digest(model: nn.Module) -> str:
    whole = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        whole.update(name.encode() + tensor.full_tensor().cpu().numpy().tobytes())
    return whole.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with FSDP2 and snapshots.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())

    checkpoints = RUN / "checkpoints"
    snapshots = snapshot.Snapshots(
        {"model": model, "optimizer": optimizer, "rng": snapshot.Rng()},
        checkpoint=lambda: load(checkpoints, model, optimizer),
    )
    restored = snapshots.restore()
    print(f"rank {dist.get_rank()} restored: {restored}", flush=True)
    for step in range(restored.step or 0, arguments.steps):
        inject_fault(step)
        batch = torch.rand(16, 32).to(device)  # the generators are a part of the state
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        snapshots.take(step + 1)
        if arguments.checkpoint_every and (step + 1) % arguments.checkpoint_every == 0:
            save(checkpoints, step + 1, model, optimizer)
        receipt.step(step, loss=loss.item())

    result = digest(model)
    if dist.get_rank() == 0:
        print(f"snapshots took {snapshots.overhead.share:.1%} of the time")
        print(f"result {result}", flush=True)
    receipt.peak_memory()
    receipt.end()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
