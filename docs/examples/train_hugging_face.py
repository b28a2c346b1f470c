"""The Hugging Face Trainer with ``ReceiptCallback``, going on from its last checkpoint.

    ncclops launch --nproc-per-node 2 docs/examples/train_hugging_face.py

Needs ``pip install transformers accelerate``. ``--raise-at 5`` raises once on rank 1, and all ranks
start again in the same processes. ``ncclops stop`` has the Trainer save after a step and end.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ncclops.integrations.hugging_face import ReceiptCallback

RUN = Path(os.environ.get("NCCLOPS_RUN_DIR", "."))


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(512, 16)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index]}


class Model(nn.Module):
    """Any module that returns its loss; a model of ``transformers`` would be the usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


class RaiseOnce(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and args.process_index == 1 and first_time():
            raise RuntimeError("raised once, as asked")


def first_time() -> bool:
    try:
        (RUN / "raised").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with the Trainer.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--raise-at", type=int, metavar="STEP", help="once, on rank 1")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    output = RUN / "checkpoints"
    trainer = Trainer(
        model=Model(),
        args=TrainingArguments(
            output_dir=str(output),
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            logging_steps=1,
            save_steps=4,
            eval_strategy="steps",
            eval_steps=6,
            report_to="none",
            skip_memory_metrics=False,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        callbacks=[RaiseOnce(arguments.raise_at), ReceiptCallback()],
    )
    last = get_last_checkpoint(str(output)) if output.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
