"""A training loop with Accelerate, receipts, and a checkpoint that every start goes on from.

    ncclops launch --nproc-per-node 2 docs/examples/train_accelerate.py

Needs ``pip install accelerate``. ``--raise-at 5`` raises once on rank 1, and all ranks start again
in the same processes. ``accelerate launch`` is not needed: Accelerate reads the same variables.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ncclops import receipt

RUN = Path(os.environ.get("NCCLOPS_RUN_DIR", "."))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with Accelerate.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--raise-at", type=int, metavar="STEP", help="once, on rank 1")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(inputs), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    checkpoint, counter = RUN / "checkpoints" / "accelerate", torch.zeros(1, dtype=torch.long)
    accelerator.register_for_checkpointing(Counter(counter))
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
        accelerator.print(f"goes on after step {int(counter)}")

    for (batch,) in accelerator.skip_first_batches(loader, int(counter)):
        step = int(counter)
        if step == arguments.steps:
            break
        if step == arguments.raise_at and accelerator.process_index == 1 and first_time():
            raise RuntimeError("raised once, as asked")
        loss = (model(batch) - batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        counter += 1
        receipt.step(step, tokens=batch.numel(), loss=loss.item())
        accelerator.print(f"step {step} loss {loss.item():.4f}")
        if int(counter) % 4 == 0:
            with receipt.phase("checkpoint"):
                accelerator.wait_for_everyone()
                accelerator.save_state(str(checkpoint))
    receipt.end()
    accelerator.end_training()


class Counter:
    """What Accelerate saves of ``counter`` with a checkpoint."""

    def __init__(self, counter: torch.Tensor) -> None:
        self.counter = counter

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"counter": self.counter}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.counter.copy_(state["counter"])


def first_time() -> bool:
    try:
        (RUN / "raised").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()
