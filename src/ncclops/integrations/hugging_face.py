"""Receipts from ``transformers.Trainer``.

    from ncclops.integrations.hugging_face import ReceiptCallback

    trainer = Trainer(..., callbacks=[ReceiptCallback()])

Put it last: a stop ends the process in its ``on_train_end``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ncclops import receipt
from ncclops.integrations._phases import Phases


class ReceiptCallback(TrainerCallback):
    """Each optimizer step is a receipt, saving and evaluating are phases, the end is the marker.

    ``phase_limit`` is how long saving or evaluating may take (a ``timedelta`` or text such as
    ``"30m"``). On a stop (``ncclops stop``) the Trainer saves a checkpoint after the agreed step,
    unless it is told never to (``save_strategy="no"``), and ends; ``train()`` does not return then.

    The Trainer gives callbacks no loss of a single step, so receipts have none; the loss that it
    logs is found in its output. Tokens are counted with ``include_num_input_tokens_seen``.
    """

    def __init__(self, phase_limit: timedelta | str = "30m") -> None:
        self._phases = Phases(phase_limit)
        self._training = False
        self._stopping = False
        self._tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A stop may take effect from now on."""
        self._training, self._stopping = True, False
        self._tokens = state.num_input_tokens_seen
        receipt.on_stop(_saved_by_the_trainer)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Whatever came between two steps is over."""
        self._phases.end()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report the step; where a stop was agreed for it, have the Trainer save and end."""
        if receipt.step(state.global_step, self._new_tokens(state, args), ends=False):
            self._stopping = True
            control.should_evaluate = False
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True
        self._between_steps(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """What is due at the end of an epoch begins; after a stop nothing is."""
        if self._stopping:
            control.should_evaluate = control.should_save = False
        self._between_steps(control)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """An evaluation goes on, perhaps one that the script has called for."""
        if not self._phases.is_open:
            self._phases.begin("eval")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The evaluation is over; a checkpoint may follow, also where its result decides that."""
        self._phases.end()
        if self._training and (control.should_save or args.save_strategy == "best"):
            self._phases.begin("checkpoint")

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any = None,
        **_: Any,
    ) -> None:
        """The prediction is over."""
        self._phases.end()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The checkpoint is written."""
        self._phases.end()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The end marker; or, where a stop was agreed, the end of the process (SystemExit)."""
        self._phases.end()
        self._training = False
        if self._stopping:
            _close_progress_bars()
            receipt.stop()
        receipt.end()

    def _between_steps(self, control: TrainerControl) -> None:
        if control.should_evaluate:
            self._phases.begin("eval")
        elif control.should_save:
            self._phases.begin("checkpoint")

    def _new_tokens(self, state: TrainerState, args: TrainingArguments) -> float | None:
        """Of this rank: the Trainer counts those of all."""
        new = state.num_input_tokens_seen - self._tokens
        self._tokens = state.num_input_tokens_seen
        return new / args.world_size if new else None


def _close_progress_bars() -> None:
    """What the Trainer's own callback, which it calls last, does not come to at a stop.

    A bar that is left open prints an error when the interpreter ends.
    """
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()


def _saved_by_the_trainer() -> None:
    """What there is to do at a stop; that there is such a thing has it end after a step."""
