"""Whole logs of scripts that only print: steps, rate, memory, end and verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ncclops.receipts.judge import Receipt, judge
from ncclops.receipts.log_scan import LogScan
from ncclops.receipts.sources import load

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


@pytest.mark.parametrize(
    "after",
    [
        "E0529 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) rank: 0",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.",
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-03-01 DUE TO TIME LIMIT ***",
        "Bus error (core dumped)",
        "run.sh: line 12: 12345 Killed                  python train.py",
        "Fatal Python error: Aborted",
        "terminate called after throwing an instance of 'c10::Error'",
        "[n1:12345] *** Process received signal ***",
        "mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 9 (Killed).",
        "a non-zero exit code. Per user-direction, the job has been aborted.",
        "[ERROR] [launch.py:321:sigkill_handler] ['python', 'a.py'] exits with return code = 1",
        "subprocess.CalledProcessError: Command 'a' returned non-zero exit status 1.",
        "[Rank 3] To avoid data inconsistency, we are taking the entire process down.",
    ],
)
def test_what_launchers_and_libraries_say_of_a_failure_takes_back_the_end(after: str) -> None:
    assert receipt_of([*STEPS, "Training finished", after]).verdict == "incomplete"


def lone_log(tmp_path: Path, *lines: str) -> Receipt:
    log = tmp_path / "train.log"
    log.write_text("".join(f"{line}\n" for line in lines))
    return judge(load(log))


def test_an_end_close_behind_a_failure_may_be_older(tmp_path: Path) -> None:
    receipt = lone_log(tmp_path, *FAILED, *STEPS, "Training finished")
    assert receipt.verdict == "incomplete"
    assert receipt.rules[-1].evidence == receipt.facts.unproven
    assert receipt.facts.unproven is not None
    assert receipt.facts.unproven.line == 1


@pytest.mark.parametrize(
    "lines",
    [
        (*FAILED, *STEPS, *["NCCL INFO Channel 00"] * 500, "Training finished"),
        (*FAILED, *STEPS, *["step 200 loss 2.3"] * 500, "Training finished"),
        (*STEPS, *FAILED, *STEPS, "Training finished"),
        ("Exception in thread Thread-2:", *FAILED, *STEPS, "Training finished"),
    ],
)
def test_an_end_that_is_newer_than_the_failure(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert lone_log(tmp_path, *lines).verdict == "healthy"


TABLES = {
    "tabs": ("step\tloss", "{step}\t8.46"),
    "blanks": ("Step   Training_Loss   lr", " {step}   8.46   1e-4"),
    "bars": ("| step | epoch | loss |", "| {step} | 1 | nan |"),
    "commas": ("global_step,lr,train_loss", "{step},1e-4,2.31e+00"),
    "rates": ("Step\tImg/sec\ttotal_loss", "{step}\timages/sec: 204.8 +/- 0.0\t9.111"),
}


@pytest.mark.parametrize(("head", "row"), TABLES.values(), ids=TABLES)
def test_steps_in_a_table(head: str, row: str) -> None:
    lines = [head]
    for step in range(10, 101, 10):
        lines += [row.format(step=step), "NCCL INFO Channel 00", "1 2 3 4 5 6 7", "saved"]
    receipt = receipt_of([*lines, *END])
    assert receipt.verdict == "healthy"
    assert receipt.facts.steps == 10
    assert receipt.steady_rate == (204.8 if "Img" in head else None)


@pytest.mark.parametrize(
    ("head", "row"),
    [
        ("step\tval_loss", "{step}\t8.46"),
        ("epoch  train_loss  valid_loss", "{step}  0.1  0.2"),
        ("the loss of each step", "{step} 0.1"),
        ("step,loss", "{step},8.46,7"),
        ("step,loss", "{step},unknown"),
    ],
)
def test_what_is_no_table_of_steps(head: str, row: str) -> None:
    assert receipt_of([head, *(row.format(step=n) for n in range(9)), *END]).facts.steps == 0


def test_a_second_line_with_the_time_of_a_step_gives_the_rate() -> None:
    lines = [
        line
        for step in range(5)
        for line in (
            f"Epoch 1/500, Step {step}/1516, loss: 10.0633",
            f"Epoch 1/500, Step {step}/1516, step time: 100.0 ms",
        )
    ]
    assert receipt_of([*lines, *END]).steady_rate == 10.0
