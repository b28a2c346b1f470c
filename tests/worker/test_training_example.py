"""The example survives each kind of fault with the loss of the run that nothing disturbed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, REPOSITORY, CompletedText, clean_environ
from tests.lanes import Lane
from tests.launch.conftest import Run

EXAMPLE = REPOSITORY / "docs" / "examples" / "train_ddp.py"
STEPS = ["--steps", "12"]
PHASES = {"detect", "abort", "leave", "finalize", "health_check", "barrier", "assign", "enter"}

Ncclops = Callable[..., CompletedText]


def final_loss(output: str) -> float:
    (found,) = re.findall(r"final loss ([\d.]+)", output)
    return float(found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of one process: the number of ranks makes no difference beyond rounding."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *STEPS],
        cwd=tmp_path_factory.mktemp("undisturbed"),
        env=clean_environ({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return final_loss(done.stdout)


# In the gate, the tutorial's faults strike the same script, and `launch/test_in_process.py` loses
# rank 0 on NCCL.
@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lane", "fault", "cause", "lost"),
    [
        ("gloo", "raise:1:5", "RuntimeError: injected on rank 1 at step 5", []),
        ("gloo", "kill:0:5", "the process died", [0]),
        # By the restart core or the agent, in the same second.
        ("gloo", "hang:1:5", "did not move|stale for more than", []),
        ("nccl", "kill:0:5", "the process died", [0]),
    ],
    indirect=["lane"],
)
def test_a_fault_costs_no_loss(
    fault: str,
    cause: str,
    lost: list[int],
    undisturbed: float,
    lane: Lane,
    ncclops: Ncclops,
    only_run: Callable[[], Run],
    tmp_path: Path,
) -> None:
    done = ncclops(
        "launch", "--nproc-per-node", "3", "--profile", lane.profile, "--timeout", "soft=5s",
        "--timeout", "hard=60s", "--tee", "all", EXAMPLE, *STEPS,
        env={"TRAIN_DDP_FAULT": fault},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if not lane.needs_gpus:  # the fake GPU does not compute a transformer
        assert final_loss(done.stdout) == pytest.approx(undisturbed, abs=0.001)
    run = only_run()
    kind, victim, _ = fault.split(":")
    faults = run.named("fault")
    assert re.search(cause, faults[0]["cause"])
    if kind != "hang":  # there all ranks stand still, and one that waits is as good as the other
        assert faults[0]["rank"] == int(victim)
    restart = run.named("restart")[0]
    assert re.search(cause, restart["cause"])
    assert restart["ranks_lost"] == lost
    assert set(restart["phases_ms"]) >= PHASES
    assert run.verdict["receipt"]["verdict"] == "healthy"
