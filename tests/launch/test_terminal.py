"""What a user sees of a run, whole: each line is there for a reason, and once.

What differs from run to run (seconds) and the name of this machine are
replaced; the first lines, which say what was chosen, are looked at elsewhere.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, CompletedText, free_port
from tests.launch.conftest import Background

Ncclops = Callable[..., CompletedText]

pytestmark = pytest.mark.slow

FAULTY = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

def step(number):
    width = 8
    if number == 4:
        FAULT
    return model(torch.ones(2, width)).sum()

for number in range(6):
    dist.all_reduce(step(number).detach())
    print("step", number, "loss 1.0", flush=True)
"""
SHAPES = "width = 9 if rank == 1 else 8"
KILLED = "if os.environ['RANK'] == '1' and size == 3: os.kill(os.getpid(), signal.SIGKILL)"
HANGS = "time.sleep(1000) if rank == 1 else None"
IMPATIENT = """
description = "For tests: short windows."
extends = "local-cpu"
[timeouts]
stop_grace = "1s"
[watch]
hang = "3s"
quiet = "4s"
"""
_BEGINNING = ("torch ", "profile ", "1 worker", "2 workers", "3 workers", "run directory ")


def told(text: str, *replaced: tuple[str, str]) -> str:
    """The lines of ``text`` after those of the start, without what differs from run to run."""
    lines = text.splitlines(keepends=True)
    text = "".join(
        line for line in lines if not line.startswith(tuple(f"ncclops: {b}" for b in _BEGINNING))
    )
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
    text = re.sub(r"after \d+\.\d+s", "after Ns", text)
    text = re.sub(r"^ncclops: goodput: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\d+ frames? in torch", "N frames in torch", text)
    text = text.replace("Error: addmm: mat1", "Error: mat1")  # since torch 2.15
    text = re.sub(r'File "\S+/train.py"', 'File "train.py"', text)
    for pattern, words in replaced:
        text = re.sub(pattern, words, text)
    return text


def expected(name: str) -> str:
    return (Path(__file__).parent / "terminal" / f"{name}.txt").read_text()


@pytest.fixture
def seen(ncclops: Ncclops, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """stdout and stderr of a job of ``ranks`` ranks, with ``fault`` before the third step."""

    def run(
        fault: str, *options: str, ranks: int = 2, replaced: tuple[tuple[str, str], ...] = ()
    ) -> tuple[str, str]:
        (tmp_path / "train.py").write_text(FAULTY.replace("FAULT", fault))
        start = ("launch", "--run-dir", "run", "--nproc-per-node", str(ranks), *options)
        done = ncclops(*start, "train.py")
        return done.stdout, told(done.stderr, *replaced)

    return run


Seen = Callable[..., tuple[str, str]]
STEPS = "".join(f"[rank0]: step {number} loss 1.0\n" for number in range(6))
UNTIL_THE_FAULT = STEPS[: len(STEPS) * 4 // 6]


def test_a_mistake_on_one_rank(seen: Seen) -> None:
    stdout, stderr = seen(SHAPES)
    assert stdout == UNTIL_THE_FAULT * 2
    assert stderr == expected("one_rank")


def test_a_job_that_went_on_with_fewer_ranks(seen: Seen) -> None:
    stdout, stderr = seen(KILLED, ranks=3)
    assert stdout == UNTIL_THE_FAULT + STEPS
    assert stderr == expected("fewer_ranks")


def test_a_hang(seen: Seen, tmp_path: Path) -> None:
    """Rank 0, which is interrupted in its collective, prints a traceback of torch's."""
    (tmp_path / "impatient.toml").write_text(IMPATIENT)
    options = ("--profile", "./impatient.toml", "--restart", "process", "--warm-start")
    # Who waits for rank 1 may count as stuck by the time of that look.
    replaced = ((r"(?m)^\[rank0\]: .*\n", ""), ("all ranks are stuck; ", ""))
    stdout, stderr = seen(HANGS, *options, replaced=replaced)
    assert stdout == UNTIL_THE_FAULT
    assert stderr == expected("hang")


@pytest.mark.extended
def test_a_mistake_on_another_node(background: Callable[..., Background], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAULTY.replace("FAULT", SHAPES))
    where = ("--nnodes", "2", "--rdzv-backend", "static", "--master-addr", "127.0.0.1")
    port = str(free_port())
    first, second = (
        background(
            "launch", "--run-dir", f"node-{node}", "--nproc-per-node", "1", *where,
            "--master-port", port, "--node-rank", str(node), "train.py",
            stderr=subprocess.DEVNULL if node else subprocess.PIPE, text=True,
        )
        for node in range(2)
    )  # fmt: skip
    seen = first.communicate(timeout=LIMIT_S)[1]
    second.wait(LIMIT_S)
    assert told(seen, (r"127\.0\.0\.1:\d+", "ADDRESS")) == expected("two_nodes")
