"""Lightning's Trainer with ``ReceiptCallback``, going on from its last checkpoint at every start.

    ncclops launch --nproc-per-node 2 docs/examples/train_lightning.py

Needs ``pip install lightning``. ``--raise-at 5`` raises once on rank 1, and all ranks start again
in the same processes. ``ncclops stop`` writes ``stopped.ckpt`` after a step and ends.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ncclops.integrations.lightning import ReceiptCallback

RUN = Path(os.environ.get("NCCLOPS_RUN_DIR", "."))


class Module(LightningModule):
    def __init__(self, raise_at: int | None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.raise_at = raise_at

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == self.raise_at and self.global_rank == 1 and first_time():
            raise RuntimeError("raised once, as asked")
        loss = (self.model(batch[0]) - batch[0]).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.model(batch[0]) - batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def first_time() -> bool:
    try:
        (RUN / "raised").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with Lightning.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--raise-at", type=int, metavar="STEP", help="once, on rank 1")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(512, 16)), batch_size=8)
    trainer = Trainer(
        max_steps=arguments.steps,
        # One node: as many as there are, also after a restart that has lost one.
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp",
        default_root_dir=RUN,
        log_every_n_steps=1,
        val_check_interval=6,
        limit_val_batches=2,
        callbacks=[
            ReceiptCallback(),
            ModelCheckpoint(RUN / "checkpoints", every_n_train_steps=4, save_last=True),
        ],
        logger=False,
        enable_model_summary=False,
    )
    # A stop writes its own, which is newer than the last that ModelCheckpoint has written.
    paths = (RUN / "checkpoints" / "last.ckpt", RUN / "stopped.ckpt")
    saved = [path for path in paths if path.exists()]
    newest = max(saved, key=lambda path: path.stat().st_mtime, default=None)
    trainer.fit(Module(arguments.raise_at), data, data, ckpt_path=newest)


if __name__ == "__main__":
    main()
