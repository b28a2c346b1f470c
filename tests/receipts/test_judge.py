"""Whole logs judged by the five rules: the contract's own form and those of public trainers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ncclops.receipts import log_formats
from ncclops.receipts.judge import Receipt, judge
from ncclops.receipts.log_scan import LogScan
from ncclops.receipts.sources import load

PLAYBOOK = """\
torch 2.12.0.dev flash_attn 2.8 triton 3.6 nccl 2.28
compile_warmup 31.20s
step 00000 loss 10.981 tok/s 2,310
step 00001 loss 10.455 tok/s 701,000
step 00002 loss 10.031 tok/s 790,500
step 00003 loss 9.722 tok/s 812,000
peak memory 17.92 GiB
training finished: final loss 9.722
"""


def receipt_of(log: str, extra: Sequence[log_formats.Form] = ()) -> Receipt:
    scan = LogScan("train.log", extra_forms=extra)
    for line in log.splitlines(keepends=True):
        scan.feed(line)
    return judge(scan.facts)


def broken(receipt: Receipt) -> list[str]:
    return [rule.rule for rule in receipt.rules if not rule.ok]


def first_lines(count: int) -> str:
    return "".join(PLAYBOOK.splitlines(keepends=True)[:count])


def without(word: str) -> str:
    return "".join(line for line in PLAYBOOK.splitlines(keepends=True) if word not in line)


def test_a_complete_receipt_is_healthy_and_names_its_lines() -> None:
    receipt = receipt_of(PLAYBOOK)
    assert receipt.verdict == "healthy"
    document = receipt.to_json()
    assert document["compile_warmup_s"] == 31.2
    assert document["steps"] == 4
    assert document["first_real_step"] == 1
    assert document["peak_memory_gib"] == 17.92
    assert [rule["evidence"] for rule in document["rules"]] == [
        "train.log:2: compile_warmup 31.20s",
        "train.log:3: step 00000 loss 10.981 tok/s 2,310",
        "train.log:6: step 00003 loss 9.722 tok/s 812,000",
        "train.log:7: peak memory 17.92 GiB",
        "train.log:8: training finished: final loss 9.722",
    ]


def test_step_0_never_enters_the_rate() -> None:
    assert receipt_of(PLAYBOOK).facts.steady_rate == 790_500
    slow_start = PLAYBOOK.replace("tok/s 2,310", "tok/s 1")
    assert receipt_of(slow_start).facts.steady_rate == 790_500


@pytest.mark.parametrize(
    ("log", "verdict"),
    [
        ("", "startup-stall"),
        (first_lines(1), "startup-stall"),
        ("compile_warmup started\n", "compile-stall"),
        ("INFO Compiling the model with torch.compile\n[rank0]: ...", "compile-stall"),
        (first_lines(2), "compile-stall"),
        (first_lines(3), "rumour"),
        (first_lines(4), "rumour"),
        (first_lines(5), "rumour"),
        (first_lines(6), "incomplete"),
        (first_lines(7), "incomplete"),
        (without("peak memory"), "incomplete"),
        (without("training finished"), "incomplete"),
        (without("compile_warmup"), "incomplete"),
    ],
)
def test_what_is_missing_decides(log: str, verdict: str) -> None:
    assert receipt_of(log).verdict == verdict


@pytest.mark.parametrize(
    "log", [first_lines(6), without("peak memory"), without("training finished")]
)
def test_no_rate_is_stated_that_the_rules_do_not_carry(log: str) -> None:
    receipt = receipt_of(log)
    assert receipt.facts.steady_rate is not None
    assert (receipt.steady_rate, receipt.rate_unit) == (None, None)
    assert receipt.to_record().steady_rate is None


def test_a_warm_up_that_ended_is_not_said_to_be_under_way() -> None:
    ended, begun = receipt_of(first_lines(2)), receipt_of("compile_warmup started\n")
    assert (ended.verdict, begun.verdict) == ("compile-stall", "compile-stall")
    assert ended.meaning == "warm-up is over, and no step followed"
    assert "before compile warm-up was over" in begun.meaning


def test_a_broken_rule_shows_the_line_that_breaks_it() -> None:
    only_step_0 = receipt_of(first_lines(3))
    contaminated = only_step_0.rules[1]
    assert not contaminated.ok
    assert contaminated.evidence is not None
    assert contaminated.evidence.line == 3
    no_end = receipt_of(first_lines(7))
    assert broken(no_end) == ["end-marker"]
    assert no_end.rules[4].evidence is not None
    assert no_end.rules[4].evidence.text.startswith("step 00003")


def test_steps_after_an_end_marker_take_it_back() -> None:
    """A second start appended to the same log and died: the first one's end is not the run's."""
    assert receipt_of(PLAYBOOK + "step 00002 loss 9.9 tok/s 3,000\n").verdict == "incomplete"


def test_a_restart_from_a_checkpoint_goes_on_with_the_same_receipt() -> None:
    again = "compile_warmup 4.00s\nstep 00002 loss 1 tok/s 9\nstep 00003 loss 1 tok/s 800,000\n"
    receipt = receipt_of(first_lines(5) + again + "".join(PLAYBOOK.splitlines(True)[6:]))
    assert receipt.verdict == "healthy"
    assert receipt.facts.steps == 4
    # The first step after the restart (9 tok/s) is a second step 0.
    assert receipt.facts.steady_rate == pytest.approx(790_500)


def test_a_warmup_time_printed_after_the_first_step_is_the_first_step_s() -> None:
    lines = PLAYBOOK.splitlines(keepends=True)
    receipt = receipt_of("".join([lines[2], lines[1], *lines[3:]]))
    assert receipt.verdict == "healthy"
    assert receipt.facts.first_real_step == 1


def test_steps_counted_from_1_after_a_stated_warmup_all_count() -> None:
    log = "compile_warmup 9.1s\nstep 1 loss 3\nstep 2 loss 2\nstep 3 loss 1\n"
    receipt = receipt_of(log + "peak memory 2 GiB\ntraining done\n")
    assert receipt.verdict == "healthy"
    assert receipt.facts.first_real_step == 1


def test_several_ranks_in_one_file_are_distinguished() -> None:
    lines = [
        f"[rank{rank}]: step {step:05d} loss 3.1\n" for step in range(2) for rank in (0, 1, 2, 3)
    ]
    receipt = receipt_of("compile_warmup 3s\n" + "".join(lines))
    assert receipt.facts.steps == 2
    assert receipt.verdict == "rumour"


# ---- public trainers ------------------------------------------------------------------------


def megatron(iterations: Sequence[int], *, end: bool = True) -> str:
    head = """\
>>> done with compiling and loading fused kernels. Compilation time: 3.121 seconds
[after dataloaders are built] datetime: 2026-03-01 09:59:58
[before the start of training step] datetime: 2026-03-01 10:00:00
"""
    steps = "".join(
        f" [2026-03-01 10:00:0{n % 10}] iteration {n:8d}/     100 | consumed samples: {256 * n:12d}"
        f" | elapsed time per iteration (ms): {90000.0 if n == iterations[0] else 800.0} |"
        " learning rate: 1.5E-06 | global batch size:   256 | lm loss: 9.8E+00 |\n"
        for n in iterations
    )
    memory = (
        "[Rank 0] (after 10 iterations) memory (MB) | allocated: 9.0 | max allocated: 20480.0\n"
    )
    valid = " validation loss at iteration 100 | lm loss value: 3.1E+00 | lm loss PPL: 2.2E+01 | \n"
    tail = "[after training is done] datetime: 2026-03-01 11:00:00 \n" if end else ""
    return head + steps + memory + valid + tail


def test_megatron_logging_every_tenth_iteration() -> None:
    """Its first line averages over the compile too, so the three that count are the next ones."""
    receipt = receipt_of(megatron([10, 20, 30, 40]))
    assert receipt.verdict == "healthy"
    assert receipt.facts.first_real_step == 20
    assert receipt.facts.steady_rate == pytest.approx(1.25)
    assert receipt.facts.rate_unit == "steps/s"
    assert receipt.facts.peak_gib == 20.0
    assert receipt_of(megatron([10, 20, 30])).verdict == "rumour"
    assert receipt_of(megatron([10, 20, 30, 40], end=False)).verdict == "incomplete"


def test_megatron_before_its_first_iteration() -> None:
    head = "".join(megatron([10]).splitlines(keepends=True)[:3])
    assert receipt_of(head).verdict == "compile-stall"
    assert receipt_of("".join(head.splitlines(keepends=True)[:2])).verdict == "startup-stall"


def torchtitan(steps: Sequence[int]) -> str:
    prefix = "[rank0]:[titan] 2026-03-12 11:10:21,511 - root - INFO - "
    lines = [f"{prefix}Compiling each TransformerBlock with torch.compile"]
    lines += [f"{prefix}Training starts at step 1."]
    lines += [
        f"{prefix}\x1b[31mstep: {n:2d}  \x1b[32mloss:  7.1  \x1b[38;2;180;60;0mgrad_norm: 1.0  "
        f"\x1b[33mmemory: {40 + n / 10:.2f}GiB(50%)  \x1b[34mtps: {900 if n == 1 else 7000 + n}"
        "  \x1b[36mtflops: 3.1  \x1b[35mmfu: 0.1%\x1b[39m"
        for n in steps
    ]
    return "\n".join([*lines, f"{prefix}Training completed", ""])


def test_torchtitan_with_colours() -> None:
    receipt = receipt_of(torchtitan([1, 10, 20, 30]))
    assert receipt.verdict == "healthy"
    assert receipt.facts.first_real_step == 10
    assert receipt.facts.steady_rate == 7020
    assert receipt.facts.rate_unit == "tokens/s"
    assert receipt.facts.peak_gib == 43.0
    assert receipt_of(torchtitan([1])).verdict == "rumour"
    assert receipt_of(torchtitan([])).verdict == "compile-stall"


def huggingface_bar(steps: Sequence[int], total: int) -> str:
    drawn = [f" {100 * n // total:3d}%|█   | {n}/{total} [00:05<00:45,  2.0it/s]" for n in steps]
    return "\r".join(drawn)


def test_huggingface_counts_its_bar_but_not_that_of_an_evaluation() -> None:
    log = huggingface_bar(range(9), 8)
    log += "\n{'loss': 2.1, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.5}\n"
    log += huggingface_bar(range(51), 50) + "\n"
    log += "{'eval_loss': 1.9, 'eval_runtime': 3.1, 'epoch': 1.0}\n"
    log += "{'train_runtime': 81.2, 'train_loss': 2.0, 'epoch': 1.0}\n"
    receipt = receipt_of(log)
    assert receipt.facts.steps == 8
    assert receipt.verdict == "incomplete"
    assert broken(receipt) == ["peak-memory"]


def test_a_bar_alone_is_no_training() -> None:
    assert receipt_of(huggingface_bar(range(9), 8)).verdict == "startup-stall"


def test_huggingface_with_memory_metrics_is_healthy() -> None:
    log = "".join(
        f"{{'loss': {3 - n / 10}, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.{n}}}\n"
        for n in range(4)
    )
    log += (
        "{'train_runtime': 81.2, 'before_init_mem_gpu': 1073741824, 'init_mem_gpu_alloc_delta': 0,"
        " 'train_mem_gpu_alloc_delta': 1073741824, 'train_mem_gpu_peaked_delta': 2147483648,"
        " 'train_loss': 0.4, 'epoch': 3.0}\n"
    )
    receipt = receipt_of(log)
    assert receipt.verdict == "healthy"
    assert receipt.facts.peak_gib == 4.0


def test_lightning_counts_on_across_epochs() -> None:
    log = "Sanity Checking DataLoader 0:   0%|          | 0/2 [00:00<?, ?it/s]\n"
    for epoch in range(2):
        log += "\r".join(
            f"Epoch {epoch}: {25 * n:3d}%|██   | {n}/4 [00:0{n}<00:01,  1.0it/s, v_num=0]"
            for n in range(5)
        )
        log += "\n"
    receipt = receipt_of(log + "`Trainer.fit` stopped: `max_epochs=2` reached.\n")
    assert receipt.facts.steps == 8
    assert broken(receipt) == ["peak-memory"]


def test_nanogpt_s_evaluation_is_no_step() -> None:
    log = "compiling the model... (takes a ~minute)\nstep 0: train loss 10.9, val loss 10.9\n"
    assert receipt_of(log).verdict == "compile-stall"
    log += "iter 0: loss 10.9886, time 61432.11ms, mfu -100.00%\n"
    log += "".join(f"iter {n}: loss 9.9, time 500.00ms, mfu 40.1%\n" for n in (10, 20, 30))
    receipt = receipt_of(log)
    assert receipt.facts.steps == 4
    assert receipt.facts.steady_rate == pytest.approx(2.0)
    assert broken(receipt) == ["peak-memory", "end-marker"]


def test_deepspeed() -> None:
    head = "[2026-03-25 21:03:17,269] [INFO] "
    log = f"{head}[config.py:960:print] DeepSpeedEngine configuration:\n"
    for n in (10, 20, 30, 40):
        log += f"{head}[logging.py:96:log_dist] [Rank 0] step={n}, skipped=0, lr=[5e-05]\n"
        log += (
            f"{head}[timer.py:215:stop] epoch=0/micro_step={n}/global_step={n},"
            f" RunningAvgSamplesPerSec=5.0, CurrSamplesPerSec={7.5 + n / 10},"
            " MemAllocated=59.65GB, MaxMemAllocated=63.31GB\n"
        )
    log += f"{head}[launch.py:351:main] Process 48123 exits successfully.\n"
    receipt = receipt_of(log)
    assert receipt.verdict == "healthy"
    assert receipt.facts.steady_rate == pytest.approx(10.5)
    assert receipt.facts.rate_unit == "samples/s"
    assert receipt.facts.peak_gib == 63.31


def test_the_trainer_s_own_form_wins_over_the_plain_one() -> None:
    """Late steps of torchtitan look like the contract's zero-padded ones."""
    receipt = receipt_of(torchtitan([10001, 10010, 10020, 10030]))
    assert receipt.verdict == "healthy"


ENDED = "peak memory 17.92 GiB\ntraining finished\n"


@pytest.mark.parametrize(
    ("before", "step", "numbers", "steps"),
    [
        ("", "step {}", range(9_990, 10_010), 20),  # any script's, of which none is padded
        ("", "step {}", range(20_000, 20_010), 10),
        ("compile_warmup 31.20s\n", "step {}", range(9_990, 10_010), 20),
        ("compile_warmup 31.20s\n", "step {:05}", range(9_990, 10_010), 20),
        ("compile_warmup 31.20s\n", "step {:05}", range(20_000, 20_010), 10),
    ],
)
def test_steps_from_10_000_on_are_those_of_the_form_that_had_the_steps_before(
    before: str, step: str, numbers: range, steps: int
) -> None:
    lines = [f"{step.format(number)} loss 2.1 tok/s 2,310\n" for number in numbers]
    receipt = receipt_of("".join([before, *lines, ENDED]))
    assert (receipt.verdict, receipt.facts.steps) == ("healthy", steps)


def test_the_contract_s_own_steps_want_a_warm_up() -> None:
    lines = [f"step {number:05} loss 2.1\n" for number in range(9_990, 10_010)]
    assert broken(receipt_of("".join([*lines, ENDED]))) == ["compile-warmup"]


def test_a_profile_s_own_lines_are_asked_first() -> None:
    own = log_formats.parse_form(
        {
            "name": "ours",
            "zero_based": True,
            "pattern": [
                {"kind": "step", "contains": ["<<"], "regex": r"<<(?P<step>\d+)>>"},
                {"kind": "memory", "contains": ["hbm"], "regex": r"hbm (?P<gib>[\d.]+)"},
                {"kind": "end", "contains": ["bye"], "regex": r"\bbye\b"},
            ],
        }
    )
    log = "".join(f"<<{n}>>\n" for n in range(4)) + "hbm 3.5\nbye\n"
    assert receipt_of(log).verdict == "startup-stall"
    receipt = receipt_of(log, [own])
    assert receipt.verdict == "healthy"
    assert receipt.facts.peak_gib == 3.5


def test_bytes_that_are_no_text_are_no_reason_to_fail() -> None:
    scan = LogScan("binary")
    scan.feed(b"\xff\xfe step 00001 loss \x00\xff 1.0\n")
    scan.feed(b"step " + b"9" * 5000 + b" loss\n")
    assert scan.facts.steps >= 1


def test_a_run_that_failed_before_its_first_step_says_how(tmp_path: Path) -> None:
    """It said "no sign of training at all" of a script that had raised."""
    log = tmp_path / "ranks" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("ValueError: x\n")
    verdict = {"schema": "ncclops.verdict/1", "run_id": "a", "outcome": "failed", "reason": "why"}
    settled = {"exit_code": 1, "attempts": 1, "seconds": 2.0}
    (tmp_path / "verdict.json").write_text(json.dumps(verdict | settled))
    receipt = judge(load(tmp_path))
    assert receipt.verdict == "startup-stall"
    assert receipt.meaning == "the job failed before its first step: why"
    assert receipt.to_json()["failure"] == "why"
    log.write_text(PLAYBOOK)
    receipt = judge(load(tmp_path))
    assert receipt.to_json()["failure"] is None
    # It has printed its end marker, and failed behind it.
    assert receipt.verdict == "incomplete"
    assert receipt.rules[-1].note == "the job failed: why"
