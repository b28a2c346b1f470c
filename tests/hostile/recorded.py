"""A run to be damaged: two ranks that restart once and fail, with every kind of record."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

from tests.conftest import run_ncclops
from tests.hostile.mutations import damage

_SCRIPT = """
import torch
from torch import distributed
from ncclops import receipt

distributed.init_process_group("gloo")
receipt.compile_warmup(1.0)
for step in range(6):
    numbers = torch.ones(4)
    distributed.all_reduce(numbers)
    receipt.step(step, loss=0.1)
    if step == 4 and distributed.get_rank() == 1:
        raise RuntimeError("on purpose")
"""


def record(directory: Path) -> Path:
    """Run it in ``directory``; its run directory."""
    (directory / "train.py").write_text(_SCRIPT)
    done = run_ncclops(directory, "launch", "--nproc-per-node", "2", "--run-dir", "run", "train.py")
    assert done.returncode == 1, done.stdout + done.stderr
    return directory / "run"


def damaged(recorded: Path, directory: Path, seed: int) -> str:
    """Copy ``recorded`` to ``directory / "run"`` and damage one to three files; what was done."""
    random = Random(seed)
    run = directory / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(recorded, run)
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".log")
    chosen = random.sample(files, random.randint(1, 3))
    return f"seed {seed}: " + "; ".join(
        f"{path.parent.relative_to(run)}/{damage(path, random)}" for path in chosen
    )
