"""Whole logs of scripts that only print: steps, rate, memory, end and verdict."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ncclops.receipts.judge import Receipt, judge
from ncclops.receipts.log_scan import LogScan

END = ("Peak memory: 3 GiB", "Training complete")
FAILED = ("Traceback (most recent call last):", "RuntimeError: CUDA error")
STEPS = (*(f"step {step} loss 2.3" for step in range(0, 101, 10)), "Peak memory: 3 GiB")


def receipt_of(lines: Sequence[str]) -> Receipt:
    scan = LogScan("log")
    scan.feed_block("".join(f"{line}\n" for line in lines).encode())
    return judge(scan.facts)


@pytest.mark.parametrize(
    ("line", "rate"),
    [
        ("Step {step:,}/2,000,000 | loss 2.31", None),
        ("train_step: {step} loss: 2.31", None),
        ("update {step} | loss 2.31", None),
        ("[test-node-3] step {step} loss 2.31", None),
        ("step {step} | train loss 2.31 | val loss 2.5 | lr 1e-4", None),
        ("Steps:  10%|#  | {step}/2000000 [01:00<10:00, 1.2it/s, step_loss=0.31]", None),
        ("10:00:00,123 loss: 2.31, lr: 0.0001, step: {step}", None),
        ('{{"loss": 2.31, "step": {step}, "tokens_per_second": 5000.5}}', 5000.5),
        ("iter {step} loss 0.51 samples/s 1200.5", 1200.5),
        ("iter {step} loss 0.51 tokens/sec/gpu: 1200.5", 1200.5),
        ("step {step} | loss 2.31 | 1200 tok/s 5.3 ms", 1200.0),
    ],
)
def test_steps_and_rates_of_a_plain_script(line: str, rate: float | None) -> None:
    numbers = range(0, 1_200_001, 10_000)
    receipt = receipt_of([*(line.format(step=step) for step in numbers), *END])
    assert receipt.verdict == "healthy"
    assert receipt.facts.steps == len(numbers)
    assert receipt.facts.last_step == numbers[-1]
    assert receipt.steady_rate == rate


@pytest.mark.parametrize(
    "line",
    [
        "Epoch [{epoch}/9], Step [{batch}/200], Loss: 0.2341",
        "[Epoch {epoch}/9] [Batch {batch}/200] [D loss: 0.51]",
        "[{epoch}, {batch:5}] loss: 2.173",
        "Epoch {epoch} [{batch}/200] Loss: 0.3121",
        "epoch {epoch} step {batch} loss 2.31",
    ],
)
def test_steps_that_begin_again_with_each_epoch_count_on(line: str) -> None:
    steps = [line.format(epoch=epoch, batch=batch) for epoch in range(1, 10) for batch in (0, 100)]
    assert receipt_of([*steps, *END]).facts.steps == 18
    assert receipt_of([*steps, *steps, *END]).facts.steps == 18


def test_ranks_that_are_not_in_step_are_in_the_same_epochs() -> None:
    lines = [f"epoch {epoch} step {step} loss 2" for epoch in range(4) for step in range(50)]
    late = ["", "", "", *lines]
    mixed = [line for pair in zip([*lines, "", "", ""], late, strict=True) for line in pair]
    assert receipt_of([*mixed, *END]).facts.steps == 200


@pytest.mark.parametrize(
    "after",
    [
        ("Training finished", *FAILED),
        ("Epoch 3 training complete, validating", *FAILED),
        ("Training complete for epoch 3",),
        ("Training finished", "torch.distributed.elastic.errors.ChildFailedError:"),
        ("Training finished", "srun: error: n1: task 3: Exited with exit code 1"),
        ("Training complete", "Segmentation fault (core dumped)"),
        ("Epoch 3 training time: 0:01:30",),
        ('{"training_complete": false}',),
        ("uploads go on until training is complete",),
        ("Training ended with error: NaN",),
        ("validation run completed",),
        ("Training complete", "step 10 loss 2.3"),
    ],
)
def test_what_goes_on_or_fails_has_not_ended(after: tuple[str, ...]) -> None:
    assert receipt_of([*STEPS, *after]).verdict == "incomplete"


@pytest.mark.parametrize(
    "after",
    [
        ("Training done", "Exception ignored in: <function f at 0x7f>", *FAILED),
        ("Training done", "Exception in thread Thread-2 (_pin_memory_loop):", *FAILED),
        ("Training complete after 10 epochs, without errors",),
        ("Training finished! best epoch: 7",),
        ("Finished Training",),
        ("Pretraining finished.",),
        (*FAILED, "Training complete"),
        ("Training complete", " 10%|#   | 1/10 [00:01<00:09,  1.00it/s]"),
        ("Training complete", "step 100 loss 2.3"),
    ],
)
def test_what_has_ended(after: tuple[str, ...]) -> None:
    assert receipt_of([*STEPS, *after]).verdict == "healthy"


@pytest.mark.parametrize(
    "line", ["Inference step {step}, loss 2.1", "Evaluating batch {step}/500: loss 2.31"]
)
def test_what_is_no_training(line: str) -> None:
    lines = [line.format(step=step) for step in range(100)]
    assert receipt_of([*lines, "Peak memory: 3 GiB", "Run complete"]).facts.steps == 0


def test_a_bar_of_any_script_does_not_hide_the_steps_in_its_words() -> None:
    bars = [f" 10%|#   | {step}/99 [00:01<00:09] step {step} loss 2.3" for step in range(50)]
    assert receipt_of([*bars, *END]).facts.steps == 50
