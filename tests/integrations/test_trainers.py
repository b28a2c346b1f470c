"""Trainers with a loop of their own, by their examples: receipts, a restart in place, a stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LIMIT_S, REPOSITORY, CompletedText
from tests.launch.conftest import Background, Run

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "docs" / "examples"
LAUNCH = ("launch", "--profile", "local-cpu", "--nproc-per-node", "2")
CALLBACKS = {"hugging_face": "transformers", "lightning": "lightning"}


def receipts(run: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    path = run / "ranks" / str(rank) / "receipt.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


@pytest.mark.parametrize(
    "trainer",
    [
        "hugging_face",  # whose trainer is made of Accelerate
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("accelerate", "lightning")),
    ],
)
def test_a_fault_costs_the_steps_since_the_checkpoint(
    trainer: str, ncclops: Callable[..., CompletedText], only_run: Callable[[], Run]
) -> None:
    pytest.importorskip(CALLBACKS.get(trainer, trainer))
    done = ncclops(*LAUNCH, EXAMPLES / f"train_{trainer}.py", "--raise-at", "5")
    assert done.returncode == 0, done.stderr
    run = only_run()
    (restart,) = run.named("restart")
    assert (restart["cause"], restart["ranks_lost"]) == ("RuntimeError: raised once, as asked", [])
    assert not run.named("escalation"), "all went on in the same processes"
    assert (run.verdict["attempts"], run.verdict["receipt"]["verdict"]) == (1, "healthy")
    for rank in (0, 1):
        steps = [(r["iteration"], r["step"]) for r in receipts(run.path, rank, "step")]
        first = 0 if trainer == "accelerate" else 1
        assert [step for iteration, step in steps if iteration == 1] == list(
            range(first + 4, first + 12)
        )
        phases = [r["phase"] for r in receipts(run.path, rank, "phase-end")]
        assert "checkpoint" in phases
        assert ("eval" in phases) == (trainer in CALLBACKS)
        assert [r["how"] for r in receipts(run.path, rank, "end")] == ["completed"]


@pytest.mark.extended
@pytest.mark.parametrize("trainer", ["hugging_face", "lightning"])
def test_a_stop_saves_and_ends_after_one_step(
    trainer: str,
    background: Callable[..., Background],
    ncclops: Callable[..., CompletedText],
    tmp_path: Path,
) -> None:
    pytest.importorskip(CALLBACKS[trainer])
    run = Run(tmp_path / "run")
    script = EXAMPLES / f"train_{trainer}.py"
    process = background(*LAUNCH, "--run-dir", run.path, script, "--steps", "100000")
    deadline = time.monotonic() + LIMIT_S
    while len(receipts(run.path, 0, "step")) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)  # the record of another process announces nothing
    done = ncclops("stop", "run", "--reason", "enough")
    assert done.returncode == 0, done.stderr
    assert process.wait(LIMIT_S) == 0
    assert run.verdict["outcome"] == "stopped"
    assert not run.named("stop-forced")
    (at,) = {r["step"] for rank in (0, 1) for r in receipts(run.path, rank, "stop")}
    for rank in (0, 1):
        assert receipts(run.path, rank, "step")[-1]["step"] == at
        assert [r["how"] for r in receipts(run.path, rank, "end")] == ["stopped"]
    saved = f"checkpoints/checkpoint-{at}" if trainer == "hugging_face" else "stopped.ckpt"
    assert (run.path / saved).exists()
