"""Receipts from Lightning's ``Trainer``, imported as ``lightning`` or as ``pytorch_lightning``.

from ncclops.integrations.lightning import ReceiptCallback

trainer = Trainer(..., callbacks=[ReceiptCallback()])
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclops import receipt
from ncclops.integrations._phases import Phases

# They are two packages with the same contents; a script uses one. Type checkers get the newer name.
if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class ReceiptCallback(Callback):
    """Each optimizer step is a receipt, validating and saving are phases, the end is the marker.

    ``phase_limit`` is how long validating or saving may take (a ``timedelta`` or text such as
    ``"30m"``). On a stop (``ncclops stop``) a checkpoint is written after the agreed step, to
    ``checkpoint`` below the Trainer's ``default_root_dir`` (None: none is), and the process ends;
    ``fit()`` does not return then.

    The loss is reported with every ``log_every_n_steps``-th step, as reading it waits for the GPU.
    """

    def __init__(
        self, phase_limit: timedelta | str = "30m", checkpoint: str | None = "stopped.ckpt"
    ) -> None:
        self._phases = Phases(phase_limit)
        self._checkpoint = checkpoint
        self._reported = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A stop may take effect from now on."""
        self._reported = trainer.global_step

        def save() -> None:
            if self._checkpoint is not None:
                trainer.save_checkpoint(Path(trainer.default_root_dir) / self._checkpoint)

        receipt.on_stop(save)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Whatever came between two steps is over."""
        self._phases.end()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step, unless gradients are accumulated and there was none."""
        step = trainer.global_step
        if step == self._reported:
            return
        self._reported = step
        due = step % max(1, trainer.log_every_n_steps) == 0
        receipt.step(step, loss=_loss(trainer, outputs) if due else None)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Steps wait for it."""
        self._phases.begin("eval")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Steps again."""
        self._phases.end()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written; the next batch shows that it is."""
        self._phases.begin("checkpoint")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The end marker."""
        self._phases.end()
        receipt.end()


def _loss(trainer: Any, outputs: Any) -> Any:
    """What ``training_step`` has returned as loss: hooks get it divided among the batches."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return None if loss is None else loss * trainer.accumulate_grad_batches
